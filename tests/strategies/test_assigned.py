"""`p.data = ...` and `p.set_(...)` on a model in training: as in one process, or a UsageError."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run_ranks import run_ranks
from tests.worlds import world as world
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD

from paceline import ArrayDataset, BatchPlan, LoadingOptions, World, load_steps, train_step
from paceline.checkpoint.shards import gather_full_state
from paceline.data.plan import virtual_ranks_of
from paceline.errors import UsageError
from paceline.strategies import STRATEGIES, Strategy

CPU = torch.device("cpu")
NAMES = ["bucketed", "exact", "manual", "ddp", "zero", "fsdp"]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def clamp(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clamp(-0.1, 0.1)


def clone(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone() * 0.9


def initialise(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.full(p.shape, 0.01, dtype=p.dtype)


def vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.9, model.parameters())


@torch.no_grad()
def set_(model: nn.Module) -> None:
    for p in model.parameters():
        p.set_(p.detach() * 0.9)  # pyright: ignore


def transpose(model: Any) -> None:
    model[2].weight.data = model[2].weight.data.t()  # the same memory, if it is not cut


CHANGES: list[Callable[[Any], None]] = [clamp, clone, initialise, vector, set_, transpose]
NOT_CUT = {vector, set_, transpose}  # torch has no such functions for DTensors


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, x.sum(1).sin()


def plain(change: Callable[[nn.Module], None], when: str) -> dict[str, Tensor]:
    """The loop of one process, without a strategy."""
    model, (inputs, targets) = net(), data()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        optimizer.zero_grad()
        loss(model(inputs[number * 8 :][:8]), targets[number * 8 :][:8]).mean().backward()
        if when == "update":
            change(model)
        optimizer.step()
        if when == "step" or (when == "last" and number == 2):
            change(model)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def train(replica: Strategy, change: Callable[[nn.Module], None], when: str) -> dict[str, Tensor]:
    """Three steps. `when`: the model changes after each step, before each update, or after the last step."""
    world = replica.world
    share = virtual_ranks_of(world.size, world.rank, world.size)
    if when == "update":
        # before the strategy's own hook
        hooks: Any = replica.optimizer._optimizer_step_pre_hooks  # pyright: ignore[reportPrivateUsage]
        replica.optimizer.register_step_pre_hook(lambda *_: change(replica.model))
        hooks.move_to_end(next(reversed(hooks)), last=False)
    plan = BatchPlan(24, 8, world.size, shuffle=False)
    steps = [*load_steps(ArrayDataset(*data()), plan, share, LoadingOptions(CPU), start=0, stop=3)]
    for number, step in enumerate(steps):
        train_step(replica, step, loss)
        if when == "step" or (when == "last" and number == len(steps) - 1):
            change(replica.model)
    return {name: tensor.detach().clone() for name, tensor in replica.weights().items()}


def differences(rank: int, size: int) -> dict[tuple[str, str, str], float]:
    world = World(rank, size, rank, size, CPU, "gloo")
    optimizer = partial(SGD, lr=0.1, momentum=0.9)
    found: dict[tuple[str, str, str], float] = {}
    for change in CHANGES:
        for when in ("step", "update", "last"):
            wanted = plain(change, when)
            for name in NAMES:
                if name == "fsdp" and (change in NOT_CUT or when == "update"):  # it takes gradients in a hook as well
                    continue
                replica = STRATEGIES[name](net(), optimizer, world)
                try:
                    got = train(replica, change, when)
                except UsageError as error:
                    assert (name, change) == ("ddp", set_) and "p.set_" in str(error), (name, change, when)
                    continue
                saved = gather_full_state(replica.state(), world)
                for key, tensor in wanted.items():
                    for one in (got[key], saved[f"model/{key}"].reshape(tensor.shape)):
                        case = (name, change.__name__, when)
                        found[case] = max(found.get(case, 0.0), float((one - tensor).abs().max()))
    return found


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(360)
def test_assigned_data_is_trained_as_in_one_process(tmp_path: Path) -> None:
    for found in run_ranks(differences, 2, tmp_path, timeout=300):
        assert len(found) == 5 * 6 * 3 + 3 * 2 - 2  # under ddp set_ is refused, but after the last step
        assert max(found.values()) < 1e-12, {case: value for case, value in found.items() if value > 1e-12}


# ---- refused -----------------------------------------------------------------------------------------------------


def wider(model: Any) -> None:
    model[2].weight.data = torch.ones(9, 8, dtype=torch.float64)
    model[2].bias.data = torch.ones(9, dtype=torch.float64)
    model[4].weight.data = torch.ones(1, 9, dtype=torch.float64)


def resized(model: Any) -> None:
    with torch.no_grad():
        model[0].bias.set_(torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("change", [wider, resized])
@pytest.mark.parametrize("name", ["bucketed", "exact", "zero", "fsdp"])
def test_another_shape_is_refused(world: World, name: str, change: Callable[[nn.Module], None]) -> None:
    if (name, change) == ("fsdp", resized):
        return  # torch raises NotImplementedError
    replica = STRATEGIES[name](net(), partial(SGD, lr=0.1), world)
    with pytest.raises(UsageError, match="shape"):
        train(replica, change, "step")


@pytest.mark.parametrize("name", ["zero", "fsdp"])
def test_another_type_is_refused(world: World, name: str) -> None:
    def single(model: nn.Module) -> None:
        for p in model.parameters():
            p.data = p.data.float()

    with pytest.raises(UsageError, match="float32"):
        train(STRATEGIES[name](net(), partial(SGD, lr=0.1), world), single, "update")
