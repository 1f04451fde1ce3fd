"""What `zero` and `fsdp` do for optimizers that need whole parameters, and which optimizers need them."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.errors import raises
from tests.run_ranks import run_ranks
from tests.strategies.shampoo import Joint, Shampoo, muon_and_adamw
from tests.strategies.test_sharded import Blocks, data
from tests.strategies.test_state import squared
from tests.worlds import world as world
from tests.worlds import world_of
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline import BatchPlan, LoadingOptions, World, load_steps, train_step
from paceline.checkpoint.shards import ParameterShard, gather_full_state, hash_tensors
from paceline.collectives.owners import update_cost
from paceline.config.mesh import Mesh
from paceline.data.plan import virtual_ranks_of
from paceline.rank.world import create_mesh_groups
from paceline.strategies import STRATEGIES, Strategy
from paceline.strategies.optimizer_scope import find_update_scope
from paceline.train.parallelism import ModelParallelPlan

CPU, STEPS = torch.device("cpu"), 4


class Momentum(Optimizer):
    """SGD with momentum, whose state only its constructor can make."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["sum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.sub_(self.state[parameter]["sum"].add_(parameter.grad), alpha=0.1)


class Assigning(Shampoo):
    """Assigns new values, with other strides, instead of changing the old ones."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.data = (parameter - 0.1 * parameter.grad).t().contiguous().t()


class Declared(Momentum):
    """The same, declared."""

    parameter_wise = True


class Listed(Optimizer):
    """Has a list of its own: of the parameters or, with `views`, of their memory."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, views: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.own: list[Any] = [(p, p.data if views else p) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter, values in self.own:
            if parameter.grad is not None:
                values.mul_(0.9)


class Gathering(Optimizer):
    """Sums over ranks itself."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                dist.all_reduce(parameter.sub_(parameter.grad))


class Outer(AdamW):
    """Calls the step of a known class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 5), nn.Linear(5, 2))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


# ---- which optimizers need them


@pytest.mark.parametrize("make", [SGD, AdamW])
def test_known_optimizers_of_elements_need_no_whole_parameters(make: Callable[..., Optimizer]) -> None:
    assert find_update_scope(make(layers().parameters(), lr=0.1), "zero") == "element"


@pytest.mark.parametrize("make", [Muon, Adafactor, partial(Shampoo, lr=0.1), Declared, partial(Joint, first=99)])
def test_all_others_need_them_also_those_that_paceline_does_not_know(make: Callable[..., Optimizer]) -> None:
    assert find_update_scope(make(matrices(layers())), "zero") == "parameter"


@pytest.mark.parametrize("first", [0, 10])
def test_an_optimizer_that_joins_parameters_is_refused_also_if_it_only_does_so_later(first: int) -> None:
    with raises("optimizer-joins-parameters", kind="Joint", owner="strategy 'zero'"):
        find_update_scope(Joint(layers().parameters(), first), "strategy 'zero'")


def test_an_optimizer_whose_trial_fails_is_refused_and_the_reason_given() -> None:
    with raises("optimizer-not-tried", kind="Momentum") as caught:
        find_update_scope(Momentum(layers().parameters()), "zero")
    assert caught.value.fields["reason"].startswith("RuntimeError: ")


@pytest.mark.parametrize("lr", [0.0, 1e-11, torch.tensor(0.0)])
def test_a_warm_up_that_begins_at_zero_hides_nothing(lr: Any) -> None:
    optimizer = Joint(layers().parameters())
    optimizer.param_groups[0]["lr"] = lr
    with raises("optimizer-joins-parameters", kind="Joint"):
        find_update_scope(optimizer, "zero")
    assert optimizer.param_groups[0]["lr"] is lr


@pytest.mark.parametrize("views", [False, True])
def test_an_optimizer_that_would_not_train_replaced_parameters_is_refused(views: bool) -> None:
    with raises("optimizer-not-tried", kind="Listed"):
        find_update_scope(Listed(layers().parameters(), views=views), "zero")


def test_an_optimizer_that_communicates_itself_is_refused(world: World) -> None:
    with raises("optimizer-communicates", kind="Gathering", owner="zero"):
        find_update_scope(Gathering(layers().parameters()), "zero")


def test_a_trial_calls_no_hooks_of_all_optimizers_and_keeps_them() -> None:
    AdamW(layers().parameters())  # torch replaces AdamW.step by one that calls hooks
    calls = list[object]()
    hook = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        assert find_update_scope(Outer(layers().parameters(), lr=0.1, fused=True), "zero") == "parameter"
        assert not calls
        AdamW(layers().parameters()).step()
        assert calls
    finally:
        hook.remove()


def test_a_trial_changes_nothing() -> None:
    model = layers()
    optimizer, calls = Shampoo(model.parameters(), lr=0.1), list[object]()
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    before, numbers = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    find_update_scope(optimizer, "zero")
    assert not calls and not optimizer.state and torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["zero", "fsdp"])
def test_what_cannot_be_divided_is_refused_before_the_first_step(world: World, name: str) -> None:
    with raises("optimizer-joins-parameters", kind="Joint", owner=f"strategy {name!r}"):
        STRATEGIES[name](layers(), Joint, world)


def test_a_shard_of_tensor_parallelism_is_not_a_whole_parameter(world: World) -> None:
    sharded = {"0.weight": ParameterShard(torch.Size((9, 9)), 0, ((0, 7),))}
    plan = ModelParallelPlan(sharded)
    model = layers()
    with raises("optimizer-needs-whole", kind="Muon", name="0.weight"):
        plan.make_strategy(STRATEGIES["bucketed"], model, lambda _: Muon(matrices(model)), world, 1)
    plan.make_strategy(STRATEGIES["bucketed"], model, lambda _: Muon(matrices(model)[1:]), world, 1)
    plan.make_strategy(STRATEGIES["bucketed"], model, lambda _: AdamW(model.parameters()), world, 1)


def test_the_cost_of_a_matrix_grows_with_its_smaller_side() -> None:
    assert [update_cost(shape) for shape in ((), (6,), (0, 3), (8, 2), (2, 8), (4, 4), (2, 3, 4))] == [
        1, 6, 0, 32, 32, 64, 48,
    ]  # fmt: skip


# ---- how ranks divide them


class Unused(Blocks):
    """One matrix is never used."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.unused = nn.Linear(width, width, bias=False, dtype=torch.float64)


def train(replica: Strategy, virtual_ranks: int) -> None:
    world = replica.world.data
    share = virtual_ranks_of(virtual_ranks, world.rank, world.size)
    for step in load_steps(data(), BatchPlan(22, 10, virtual_ranks), share, LoadingOptions(CPU), start=0, stop=STEPS):
        train_step(replica, step, squared, max_norm=1.0)


def state_of(replica: Strategy) -> tuple[str, dict[str, Tensor]]:
    state = gather_full_state(replica.state(), replica.world)
    return hash_tensors(state), {name: tensor.clone() for name, tensor in state.items()}


def divided(rank: int, size: int) -> dict[str, Any]:
    """What each strategy computes, and what this rank holds for Muon."""
    found: dict[str, Any] = {}
    makers = {"muon": partial(muon_and_adamw, lr=0.02), "shampoo": partial(Shampoo, lr=0.05)}
    for (name, make), strategy in ((item, s) for item in makers.items() for s in ("exact", "zero", "fsdp")):
        replica = STRATEGIES[strategy](Unused(), make, world_of(rank, size), virtual_ranks=3)
        train(replica, 3)
        found[name, strategy] = state_of(replica)
        if (name, strategy) in (("muon", "zero"), ("muon", "fsdp")):
            muon = replica.optimizers[0]
            owned = [p for group in muon.param_groups for p in group["params"]]
            momenta = [tensor for state in muon.state.values() for tensor in state.values()]
            stored = sum(p.untyped_storage().nbytes() for p in owned)
            found[strategy] = [p.numel() for p in owned], [tuple(t.shape) for t in momenta], stored
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(divided, 3, tmp_path_factory.mktemp("divided"))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "shampoo"])
def test_they_compute_what_unsharded_strategies_compute(found: list[dict[str, Any]], optimizer: str) -> None:
    digest, wanted = found[0][optimizer, "exact"]
    assert not any("unused" in name for name in wanted if name.startswith("optimizer/"))
    for of_rank in found:
        assert of_rank[optimizer, "zero"][0] == digest
        state = of_rank[optimizer, "fsdp"][1]
        assert state.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_each_parameter_has_one_owner_and_ranks_have_about_the_same_work(
    found: list[dict[str, Any]], strategy: str
) -> None:
    of_ranks = [of_rank[strategy] for of_rank in found]
    sizes = [sorted(owned) for owned, _, _ in of_ranks]
    assert sum(map(len, sizes)) == 7  # the first, four blocks, the last, and the unused one
    squares = [owned.count(32 * 32) for owned in sizes]
    assert sorted(squares) == [1, 2, 2]
    assert sum(len(momenta) for _, momenta, _ in of_ranks) == 6
    assert all(shape in ((32, 4), (32, 32), (1, 32)) for _, momenta, _ in of_ranks for shape in momenta)
    # between updates only `zero`, whose ranks have all weights, holds the values of whole parameters
    assert all((stored > 1000) == (strategy == "zero") for _, _, stored in of_ranks)


@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_an_optimizer_may_assign_data_and_the_loop_change_the_weights_afterwards(world: World, strategy: str) -> None:
    found: list[dict[str, Tensor]] = []
    for name in ("single", strategy):
        replica = STRATEGIES[name](Unused(), partial(Assigning, lr=0.1), world, virtual_ranks=1)
        for _ in range(2):
            train(replica, 1)
            for parameter in replica.model.parameters():
                parameter.detach().mul_(0.5)
        found.append({name: tensor.clone() for name, tensor in replica.weights().items()})
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted, rtol=1e-12, atol=1e-12, msg=name)


def test_an_optimizer_of_whole_parameters_may_have_none_to_train(world: World) -> None:
    model = Unused()
    for parameter in matrices(model):
        parameter.requires_grad_(False)
    replica = STRATEGIES["zero"](model, partial(muon_and_adamw, lr=0.02), world, virtual_ranks=1)
    before = model.first.weight.clone(), model.first.bias.clone()
    train(replica, 1)
    assert torch.equal(before[0], model.first.weight) and not torch.equal(before[1], model.first.bias)


def in_a_mesh(rank: int, size: int) -> tuple[str, dict[str, Tensor]]:
    world = create_mesh_groups(world_of(rank, size), Mesh.parse("data=2,shard=2"))
    replica = STRATEGIES["fsdp"](Unused(), partial(muon_and_adamw, lr=0.02), world.data, virtual_ranks=4)
    train(replica, 4)
    return state_of(replica)


@pytest.mark.ranks
@pytest.mark.slow
def test_fsdp_divides_them_along_shard_in_a_mesh(tmp_path: Path, world: World) -> None:
    replica = STRATEGIES["single"](Unused(), partial(muon_and_adamw, lr=0.02), world, virtual_ranks=4)
    train(replica, 4)
    _, wanted = state_of(replica)
    for _, state in run_ranks(in_a_mesh, 4, tmp_path):
        assert state.keys() == wanted.keys()
        assert all(torch.allclose(state[name], tensor, rtol=1e-9, atol=1e-9) for name, tensor in wanted.items())
