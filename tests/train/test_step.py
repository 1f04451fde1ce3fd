"""The steps of a task, one after the other: what is kept between two of them, and what is not."""

import gc
import importlib
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.errors import raises
from tests.worlds import world as world
from torch import Tensor, nn
from torch.optim import SGD

from paceline import BatchPlan, LoadingOptions, Strategy, World, load_steps, train_step
from paceline.data.arrays import ArrayDataset
from paceline.data.loader import MicroBatch
from paceline.protocol.evidence import Phase
from paceline.stepping.hooks import TensorHookTracker, describe_user_autograd_function, describe_user_backward_hook
from paceline.strategies import STRATEGIES
from paceline.train.step import TaskSteps

CPU = torch.device("cpu")
DATA = ArrayDataset(torch.arange(12.0).reshape(12, 1) / 12, torch.arange(12.0) / 6)


def made(world: World) -> Strategy:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return STRATEGIES["exact"](model, lambda p: SGD(p, lr=0.1, momentum=0.9), world, virtual_ranks=2)


def steps() -> list[list[MicroBatch]]:
    return [*load_steps(DATA, BatchPlan(12, 4, 2), range(2), LoadingOptions(CPU), start=0, stop=3)]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def bits(replica: Strategy) -> dict[str, list[float]]:
    return {held.name: held.tensor.flatten().tolist() for held in replica.state()}


def test_steps_that_are_kept_are_those_that_are_made_anew(world: World) -> None:
    kept, anew = made(world), made(world)
    take = TaskSteps(kept, loss, max_norm=0.5).take_step
    for step in steps():
        ours, theirs = take(step), train_step(anew, step, loss, max_norm=0.5)
        assert ours == theirs
        assert ours.grad_norm is not None and ours.total_weight == 4
    assert bits(kept) == bits(anew)


def test_a_step_that_an_error_ends_is_given_up_and_the_next_one_is_right(world: World) -> None:
    replica, never = made(world), made(world)
    fails = False

    def failing(outputs: Tensor, targets: Tensor) -> Tensor:
        if fails and targets is second[-1].targets:  # in the last of two micro-batches
            raise ArithmeticError("planted")
        return loss(outputs, targets)

    take = TaskSteps(replica, failing).take_step
    first, second, third = steps()
    take(first)
    before, fails = bits(replica), True
    with pytest.raises(ArithmeticError, match="planted"):
        take(second)
    assert bits(replica) == before
    fails = False
    take(third)
    for step in (first, third):
        train_step(never, step, loss)
    assert bits(replica) == bits(never)


def test_the_phases_of_a_step(world: World) -> None:
    entered: list[Phase] = []
    (step, *_) = steps()
    train_step(made(world), step, loss, enter=entered.append)
    assert entered == [*[Phase.FORWARD, Phase.BACKWARD] * 2, Phase.SYNC, Phase.OPTIMIZER]


def test_batches_are_let_go_with_their_step(world: World) -> None:
    replica = made(world)
    take = TaskSteps(replica, loss).take_step
    gc.disable()  # a circle would keep them until it runs
    try:
        first, second, _ = steps()
        seen = [weakref.ref(batch.inputs) for batch in (*first, *second)]
        take(first)
        train_step(replica, second, loss)
        del first, second, _
        assert [ref() for ref in seen] == [None] * 4
    finally:
        gc.enable()


def test_a_batch_for_more_virtual_ranks_is_refused(world: World) -> None:
    step = next(load_steps(DATA, BatchPlan(12, 12, 3), range(3), LoadingOptions(CPU), start=0, stop=1))
    with raises("wrong-virtual-ranks", virtual_rank=2, rows=2):
        train_step(made(world), step, loss)


@pytest.mark.parametrize(("folder", "is_of_user"), [("dist-packages", False), ("project", True), ("my-packages", True)])
def test_an_autograd_function_is_the_users_unless_a_package_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, is_of_user: bool
) -> None:
    """Also a package outside the environment of the interpreter: of the system, or of the user.

    A folder of the user may have such a name.
    """
    name = f"doubling_in_{folder.replace('-', '_')}"
    (tmp_path / folder).mkdir()
    (tmp_path / folder / f"{name}.py").write_text(
        "from torch.autograd import Function\n\n\nclass Double(Function):\n"
        "    forward = staticmethod(lambda ctx, x: 2 * x)\n    backward = staticmethod(lambda ctx, g: 2 * g)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / folder)
    loss = importlib.import_module(name).Double.apply(torch.ones(2, requires_grad=True)).sum()
    assert bool(describe_user_autograd_function(loss)) is is_of_user


def clamp(factor: float, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-factor, factor)


@pytest.mark.parametrize(
    "hook", [partial(clamp, 0.1), partial(torch.clamp, min=-0.1, max=0.1), torch.sign], ids=["partial", "op", "builtin"]
)
def test_a_hook_is_the_users_also_without_a_function_of_its_own(hook: Any) -> None:
    tracker = TensorHookTracker()
    try:
        hidden = torch.ones(2, requires_grad=True) * 2
        hidden.register_hook(hook)
        (hidden * 3).sum().backward()
    finally:
        tracker.remove()
    model = torch.nn.Linear(2, 1)
    model.register_full_backward_hook(hook)
    assert tracker.changed and describe_user_backward_hook([model])
