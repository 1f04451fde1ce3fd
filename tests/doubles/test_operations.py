"""The number of operations on the device in a step, compared with a plain loop."""

import os
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.doubles import gpu, syncs
from tests.doubles.test_syncs import META
from tests.run_ranks import run_ranks
from tests.run_script import free_port
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline import ArrayDataset
from paceline.collectives.control import PinnedNumberBuffers
from paceline.config.strategies import StrategyName
from paceline.data import loader
from paceline.data.arrays import IndicesOnDevice
from paceline.data.loader import LoadingOptions, load_steps
from paceline.data.plan import BatchPlan
from paceline.rank.world import World
from paceline.stepping.order import CollectiveOrderCheck
from paceline.stepping.totals import ControlFlags
from paceline.strategies import STRATEGIES
from paceline.train.step import TaskSteps

SAMPLES = 4
LAUNCH_NOTHING = ("aten::is_set_to", "aten::new_empty", "aten::empty_strided")


class Operations(syncs.HostReads):
    """Counts operations and collectives that compute or copy on a device, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name, tensors = func.name(), [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        if not func.is_view and name not in LAUNCH_NOTHING and any(tensor.device.type != "cpu" for tensor in tensors):
            self.found[name] += 1
        return result


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def losses_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets, reduction="none").mean(1)


def plain_loop(loss: Callable[[Tensor, Tensor], Tensor]) -> Generator[None]:
    model = make_model().to(gpu.device())
    optimizer = make_optimizer(model.parameters())
    inputs, targets = torch.zeros(100, 8, device=gpu.device()), torch.zeros(100, 4, device=gpu.device())
    for batch in torch.arange(100, device=gpu.device()).split(SAMPLES):
        x, y = inputs[batch], targets[batch]
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        yield


def loop_of_session(strategy: StrategyName) -> Generator[None]:
    with paceline.session(strategy=strategy, backend="gloo") as s:
        model = make_model()
        model, optimizer = s.prepare(model, make_optimizer(model.parameters()))
        data = TensorDataset(torch.zeros(100, 8), torch.zeros(100, 4))
        for x, y in s.loader(data, global_batch=SAMPLES * s.size):
            optimizer.zero_grad()
            s.backward(functional.mse_loss(model(x), y))
            optimizer.step()
            yield


def steps_of_task(strategy: StrategyName) -> Generator[None]:
    world = World.from_env(backend="gloo")
    with paceline.process_group(world):
        steps = TaskSteps(
            STRATEGIES[strategy](make_model().to(world.device), make_optimizer, world),
            losses_of,
            one_each=True, votes=ControlFlags, order=CollectiveOrderCheck(world, lambda: 0, list, print),
        )  # fmt: skip
        data = TensorDataset(torch.zeros(100, 8), torch.zeros(100, 4))
        plan = BatchPlan(100, SAMPLES * world.size, world.size)
        for batches in load_steps(
            data, plan, range(world.rank, world.rank + 1), LoadingOptions(world.device), start=0, stop=9
        ):
            steps.take_step(batches)
            yield


LOOPS = {
    "session": (loop_of_session, functional.mse_loss),
    "task": (steps_of_task, lambda outputs, targets: losses_of(outputs, targets).mean()),
}


def in_a_step(steps: Generator[None]) -> Counter[str]:
    for _ in range(3):
        next(steps)
    with Operations() as counter:
        next(steps)
    steps.close()
    return counter.found


def beyond_a_plain_loop(rank: int, size: int, kind: str, strategies: dict[str, int]) -> dict[str, tuple[int, str]]:
    """By strategy: the number of additional operations, and those that a plain loop does not have."""
    gpu.install()
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    loop, loss = LOOPS[kind]
    plain, found = in_a_step(plain_loop(loss)), dict[str, tuple[int, str]]()
    for strategy, port in strategies.items():
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        counts = in_a_step(loop(strategy))
        found[strategy] = counts.total() - plain.total(), str(dict(counts - plain))
    return found


# The goals are 6 on one rank and 9 on two. `zero` does not reach them: its limits may only fall.
MOST = {1: {"single": 6, "bucketed": 6, "exact": 6, "zero": 8}, 2: {"bucketed": 9, "exact": 9, "zero": 16}}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("ranks", MOST)
def test_a_step_has_few_operations_beyond_a_plain_loop(kind: str, ranks: int, tmp_path: Path) -> None:
    strategies = {strategy: free_port() for strategy in MOST[ranks]}
    found, *_ = run_ranks(beyond_a_plain_loop, ranks, tmp_path, kind, strategies)
    assert all(number <= MOST[ranks][strategy] for strategy, (number, _) in found.items()), found


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
    copies.copy_of(order[:20])
    order.add_(1)  # as a sampler that shuffles in place
    assert torch.equal(copies.copy_of(order[:20]), order[:20])


def test_numbers_are_sent_out_of_the_same_two_buffers() -> None:
    sender = PinnedNumberBuffers(torch.device("cpu"))
    sent = [sender.to_device([float(step), 1.0]) for step in range(5)]
    assert [numbers.tolist() for numbers in sent] == [[float(step), 1.0] for step in range(5)]
    buffers = {id(buffer) for buffer in sender._buffers}
    sender.to_device([7.0, 1.0])
    assert {id(buffer) for buffer in sender._buffers} == buffers
