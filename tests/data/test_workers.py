"""Datasets that return whole micro-batches, with the same samples and a seed for each; the room that workers need."""

import resource
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.errors import raises
from torch.utils.data import Dataset, StackDataset, Subset

from paceline.data import workers
from paceline.data.loader import LoadingOptions, load_steps
from paceline.data.plan import BatchPlan, virtual_ranks_of
from paceline.data.workers import check_shared_memory_size, has_batched_getitems

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
    steps = load_steps(dataset, plan, share, LoadingOptions(CPU, workers, collate), start=0, stop=6)
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


@pytest.mark.timeout(360)
def test_its_augmentation_belongs_to_the_micro_batch_not_to_the_worker_or_rank():
    alone = noise(batches(Batched("whole")))
    assert noise(batches(Batched("whole"), workers=2)) == alone
    ranks = [noise(batches(Batched("whole"), share=virtual_ranks_of(2, rank, 2))) for rank in range(2)]
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


def test_persistent_workers_are_killed_by_one_registered_call_however_many_epochs_they_had(monkeypatch):
    registered = []
    monkeypatch.setattr(workers, "Finalize", lambda iterator, *_, **__: registered.append(id(iterator)))
    loading = LoadingOptions(CPU, 1, kept_loaders={})
    for epoch in range(3):
        steps = range(epoch * PLAN.steps_per_epoch, (epoch + 1) * PLAN.steps_per_epoch)
        assert len([*load_steps(NumberedItems(), PLAN, range(2), loading, start=steps.start, stop=steps.stop)]) == 3
    assert len(registered) == 1


class NumberedItems(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return torch.tensor([index]), index


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
    assert not has_batched_getitems(subset) and not has_batched_getitems(StackDataset(Single(), Batched("whole")))
    assert has_batched_getitems(Subset(Batched("whole"), [0])) and has_batched_getitems(
        StackDataset(x=Batched("whole"))
    )
    assert noise(batches(subset)) == noise(batches(Single()))


# ---- room ----------------------------------------------------------------------------------------------------------


BATCH = ({"a": torch.zeros(2, 1000), "b": [torch.zeros(2, 1000)]}, torch.zeros(2, dtype=torch.int64))
SAMPLE_BYTES = 2 * 4000 + 8


@pytest.fixture
def few_files() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (75, hard))
    yield 75
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def has_free(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    monkeypatch.setattr("paceline.data.workers.shutil.disk_usage", lambda _: SimpleNamespace(free=size_bytes))


def test_room_is_counted_in_bytes_of_all_ranks_batches_ahead_and_in_use(monkeypatch) -> None:
    needed_bytes = SAMPLE_BYTES * 64 * (2 * 3 + 1) * 4
    has_free(monkeypatch, needed_bytes)
    check_shared_memory_size(BATCH, 2, largest_batch=64, num_workers=3, local_ranks=4)
    has_free(monkeypatch, needed_bytes - 1)
    with raises("shared-memory-too-small", free="13.7 MiB", num_workers=3, local_ranks=4):
        check_shared_memory_size(BATCH, 2, largest_batch=64, num_workers=3, local_ranks=4)


def test_without_loader_processes_nothing_is_refused(monkeypatch) -> None:
    has_free(monkeypatch, 0)
    check_shared_memory_size(BATCH, 2, largest_batch=64, num_workers=0, local_ranks=4)


def test_where_there_is_none_at_all_loader_processes_are_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(workers, "SHARED_MEMORY_FOLDER", str(tmp_path / "none"))
    check_shared_memory_size(BATCH, 2, largest_batch=64, num_workers=0, local_ranks=4)
    with raises("no-shared-memory", setting="num_workers"):
        check_shared_memory_size(BATCH, 2, largest_batch=64, num_workers=1, local_ranks=1)


def test_too_few_open_files_are_refused(few_files, monkeypatch) -> None:
    has_free(monkeypatch, 1 << 40)
    check_shared_memory_size(
        BATCH, 2, largest_batch=1, num_workers=1, local_ranks=1
    )  # 3 tensors x 3 batches + 64 others
    with raises("too-few-open-files", files=75, num_workers=2, needed_files=79):
        check_shared_memory_size(BATCH, 2, largest_batch=1, num_workers=2, local_ranks=1)
