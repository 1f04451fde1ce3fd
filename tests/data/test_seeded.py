"""Datasets that are asked for whole micro-batches: torch's hook, with the same samples and a seed for each batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.errors import raises
from torch.utils.data import Dataset, StackDataset, Subset

from paceline.data.loader import Loading, load_steps
from paceline.data.plan import BatchPlan, ranks_share
from paceline.data.seeded import asks_for_batches

CPU = torch.device("cpu")
PLAN = BatchPlan(23, 8, virtual_ranks=2, accumulation=2, seed=3)


class Batched(Dataset):
    """Sample i is i, and noise; `kind` says what it gives for a batch."""

    def __init__(self, kind):
        self.kind, self.asked = kind, []

    def __len__(self):
        return 23

    def __getitem__(self, index):
        raise AssertionError("asked for a single sample")

    def __getitems__(self, indices):
        self.asked.append(indices)
        inputs = torch.stack([torch.tensor(indices).float(), torch.rand(len(indices))], 1)
        targets = np.array(indices)
        if self.kind == "whole":
            return inputs, targets
        if self.kind == "short":
            return inputs[1:], targets[1:]
        return [(x, y) for x, y in zip(inputs, targets, strict=True)]


def batches(dataset, *, workers=0, share=range(2), plan=PLAN, collate=None):
    steps = load_steps(dataset, plan, share, Loading(CPU, workers, collate), start=0, stop=6)
    return [b for step in steps for b in step]


@pytest.mark.parametrize("kind", ["whole", "samples"])
def test_a_dataset_with_the_hook_is_asked_once_for_each_micro_batch(kind):
    dataset = Batched(kind)
    found = batches(dataset)
    assert dataset.asked == [b.work.indices.tolist() for b in found]
    for b in found:
        assert torch.equal(b.inputs[:, 0].long(), b.work.indices) and torch.equal(b.targets, b.work.indices)


def noise(found):
    return {(b.work.epoch, int(x[0])): float(x[1]) for b in found for x in b.inputs}


@pytest.mark.timeout(120)
def test_its_augmentation_belongs_to_the_micro_batch_not_to_the_worker_or_rank():
    alone = noise(batches(Batched("whole")))
    assert noise(batches(Batched("whole"), workers=2)) == alone
    ranks = [noise(batches(Batched("whole"), share=ranks_share(2, rank, 2))) for rank in range(2)]
    assert {**ranks[0], **ranks[1]} == alone
    assert len(set(alone.values())) == 2 * 23  # each epoch draws anew
    in_order = noise(batches(Batched("whole"), plan=replace(PLAN, shuffle=False)))
    assert len(set(in_order.values())) == 2 * 23  # also where its micro-batches are the same
    other = BatchPlan(23, 8, virtual_ranks=1, accumulation=2, seed=3)  # documented: other micro-batches, other draws
    assert noise(batches(Batched("whole"), plan=other, share=range(1))) != alone


def test_a_whole_batch_is_not_collated_and_samples_are():
    def collate(samples):
        return torch.stack([x for x, _ in samples]) + 100, torch.tensor([int(y) for _, y in samples])

    (whole, *_), (collated, *_) = (batches(Batched(kind), collate=collate) for kind in ("whole", "samples"))
    assert torch.equal(collated.inputs, whole.inputs + 100)


def test_another_number_of_samples_is_refused():
    with raises("wrong-number-of-items", dataset="Batched", asked=2, size=1):
        batches(Batched("short"))


class Single(Dataset):
    def __init__(self, size=23):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor([float(index), float(torch.rand(()))]), index


def test_torchs_own_hooks_that_only_pass_calls_on_change_no_augmentation():
    """torch.utils.data.Subset has the hook, whatever it is a subset of."""
    subset = Subset(Single(30), range(23))
    assert not asks_for_batches(subset) and not asks_for_batches(StackDataset(Single(), Batched("whole")))
    assert asks_for_batches(Subset(Batched("whole"), [0])) and asks_for_batches(StackDataset(x=Batched("whole")))
    assert noise(batches(subset)) == noise(batches(Single()))
