"""An own loop goes on after an error in a backward, on one rank or on all, as if that step had never been."""

import traceback
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from tests.run_ranks import run_ranks
from torch import Tensor, nn

from paceline import BatchPlan, LoadingOptions, load_steps
from paceline.collectives import torch_communicator
from paceline.data.arrays import ArrayDataset
from paceline.data.loader import MicroBatch
from paceline.data.plan import virtual_ranks_of
from paceline.rank.world import World
from paceline.strategies import STRATEGIES, Strategy

VIRTUAL = 5
FAILING = 1  # the step
CPU = torch.device("cpu")


def train(name: str, world: World, steps: list[list[MicroBatch]], fails: bool) -> list[Tensor]:
    """The weights after all steps but the failing one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    virtual_ranks = world.size if name == "bucketed" else VIRTUAL
    replica = STRATEGIES[name](model, lambda p: torch.optim.AdamW(p, 0.1), world, virtual_ranks=virtual_ranks)
    broken = [False]

    def hook(gradient: Tensor) -> None:
        if broken[0]:
            raise ArithmeticError("planted")

    model[1].weight.register_hook(hook)
    for number, step in enumerate(steps):
        replica.model.zero_grad(set_to_none=True)
        for batch in step:
            broken[0] = fails and number == FAILING and batch is step[-1]
            try:
                backward(replica, batch, is_last=batch is step[-1])
            except ArithmeticError:
                replica.reset()
                break
        else:
            replica.sync_gradients(torch.tensor(7.0))
        if number != FAILING:  # else the ranks that did not fail have a sum that is worth nothing
            replica.optimizer.step()
    return [w.clone() for w in replica.weights().values()]


def backward(replica: Strategy, batch: MicroBatch, *, is_last: bool) -> None:
    replica.enter(batch, is_last)
    replica.begin_backward(batch.work, is_last)
    try:
        (replica.module(batch.inputs) - batch.targets).square().sum().backward()
    except ArithmeticError as error:
        replica.end_backward(error)
        replica.leave(error)
        raise
    replica.end_backward()
    replica.leave()


def loops(rank: int, size: int) -> list[str]:
    torch_communicator.BUCKET_BYTES = 100  # a bucket for each tensor, so that some have left when the error comes
    world = World(rank, size, rank, size, CPU, "gloo")
    generator = torch.Generator().manual_seed(0)
    data = ArrayDataset(torch.randn(40, 6, generator=generator), torch.randn(40, 2, generator=generator))
    wrong: list[str] = []
    for name in ("manual", "bucketed", "exact", "zero"):
        virtual_ranks = size if name == "bucketed" else VIRTUAL
        plan = BatchPlan(40, 10, virtual_ranks)
        steps = [
            *load_steps(data, plan, virtual_ranks_of(virtual_ranks, rank, size), LoadingOptions(CPU), start=0, stop=4)
        ]
        wanted = train(name, world, steps, fails=False)
        for who in ([0], [size - 1], [*range(size)]):
            found = train(name, world, steps, fails=rank in who)
            if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
                wrong.append(f"{name} after an error on {who}")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize(("size", "memory"), [(2, "auto"), (2, "off"), pytest.param(3, "off", marks=pytest.mark.slow)])
def test_the_next_step_is_right_after_an_error_in_a_backward(size, memory, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PACELINE_SHARED_MEMORY", memory)
    assert run_ranks(loops, size, tmp_path) == [[]] * size


def test_an_error_in_a_dummy_batch_keeps_its_traceback() -> None:
    model, data = nn.Linear(6, 2), ArrayDataset(torch.randn(4, 6), torch.randn(4, 2))
    replica = STRATEGIES["single"](model, torch.optim.SGD, World(0, 1, 0, 1, CPU, "gloo"))
    ((batch,),) = load_steps(data, BatchPlan(4, 4, 1), range(1), LoadingOptions(CPU), start=0, stop=1)

    def broken() -> None:
        raise ArithmeticError

    replica.enter(replace(batch, work=replace(batch.work, is_counted=False)), is_last=True)
    with pytest.raises(ArithmeticError) as caught:
        broken()
    replica.leave(caught.value)
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][-1] == "broken"
