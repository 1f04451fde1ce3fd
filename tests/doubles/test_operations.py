"""The number of operations on the device in a step, compared with a plain loop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.doubles import syncs
from tests.doubles.test_syncs import META, begin
from tests.run_ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from paceline import ArrayDataset
from paceline.collectives.control import NumbersToDevice
from paceline.data import loader
from paceline.data.arrays import IndicesOnDevice
from paceline.data.loader import LoadingOptions, MicroBatch, load_steps
from paceline.data.plan import BatchPlan, MicroBatchPlan
from paceline.rank.world import World
from paceline.stepping.order import CollectiveOrderCheck
from paceline.stepping.totals import ControlFlags
from paceline.strategies import STRATEGIES
from paceline.train.step import TaskSteps

SAMPLES = 4


class Operations(syncs.HostReads):
    """Counts operations that compute or copy, without views. `ones`: numbers that are read as one; others are zero."""

    def __init__(self, ones: int = 2) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._ones = ones

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "profiler" not in func.name():
            self.found[func.name()] += 1
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.name() == "aten::_to_copy" and args[0].is_meta and not result.is_meta:
            result.view(-1)[self._ones :] = 0
        return result


def model_on_meta() -> nn.Module:
    with META:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets, reduction="none").mean(1)


def of_a_plain_loop() -> Counter[str]:
    model = model_on_meta()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False, foreach=True)
    for _ in range(3):
        inputs, targets = torch.empty(SAMPLES, 8, device=META), torch.empty(SAMPLES, 4, device=META)
        optimizer.zero_grad()
        with Operations() as counter:
            loss_of(model(inputs), targets).mean().backward()
            optimizer.step()
    return counter.found


def beyond_a_plain_loop(rank: int, world_size: int, strategy: str, ranks: int) -> tuple[int, dict[str, int]]:
    """The number of additional operations, and those that a plain loop does not have."""
    if ranks > 1:
        begin()
    world = World(0, ranks, 0, ranks, META, syncs.BACKEND)
    replica = STRATEGIES[strategy](
        model_on_meta(), lambda p: torch.optim.AdamW(p, lr=1e-3, fused=False, foreach=True), world
    )
    steps = TaskSteps(
        replica, loss_of, one_each=True, votes=ControlFlags, order=CollectiveOrderCheck(world, lambda: 0, list, print)
    )
    for step in range(3):
        work = MicroBatchPlan(0, step, 0, 0, torch.arange(SAMPLES), global_samples=1)
        batch = MicroBatch(torch.empty(SAMPLES, 8, device=META), torch.empty(SAMPLES, 4, device=META), work, 5)
        with Operations(ones=min(2, ranks)) as counter:  # a rank alone knows the weight
            steps.take_step([batch])
    plain = of_a_plain_loop()
    return counter.found.total() - plain.total(), dict(counter.found - plain)


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "ranks", "most"), [("single", 1, 6), ("bucketed", 1, 6), ("bucketed", 2, 9)])
def test_a_step_has_few_operations_beyond_a_plain_loop(strategy: str, ranks: int, most: int, tmp_path: Path) -> None:
    ((more, found),) = run_ranks(beyond_a_plain_loop, 1, tmp_path, strategy, ranks)
    assert more <= most, found


@pytest.mark.parametrize("dataset_class", [TensorDataset, ArrayDataset])
def test_data_on_the_device_need_one_copy_of_indices_in_an_epoch_and_no_separate_stream(
    dataset_class: type[Dataset[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "prefetch_to_device", None)
    dataset = dataset_class(torch.empty(100, 8, device=META), torch.empty(100, device=META))
    steps = load_steps(
        dataset, BatchPlan(100, 20, virtual_ranks=2), range(1, 2), LoadingOptions(META), start=0, stop=10
    )
    with Operations() as counter:
        assert [batch.inputs.shape[0] for step in steps for batch in step] == [10] * 10
    assert (counter.found["aten::_to_copy"], counter.found["aten::index_select"]) == (2, 20)
    assert not counter.lines  # the host waits for no copy


def test_indices_that_are_on_the_device_are_those_of_the_batch() -> None:
    device, order = torch.device("cpu", 0), torch.randperm(50)  # another device than that of `order`, for comparisons
    copies = IndicesOnDevice(device)
    for whole in (order[:20], order[20:40], order[40:], torch.arange(7), torch.arange(9)[2:]):
        for portion in (whole, whole[1::3], whole[::2].tensor_split(2)[1]):
            assert torch.equal(copies.copy_of(portion), portion)


def test_numbers_are_sent_out_of_the_same_two_buffers() -> None:
    sender = NumbersToDevice(torch.device("cpu"))
    sent = [sender.send([float(step), 1.0]) for step in range(5)]
    assert [numbers.tolist() for numbers in sent] == [[float(step), 1.0] for step in range(5)]
    buffers = {id(buffer) for buffer in sender._buffers}
    sender.send([7.0, 1.0])
    assert {id(buffer) for buffer in sender._buffers} == buffers
