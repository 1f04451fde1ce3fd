"""What a strategy refuses: sparse gradients, lazy modules, modules that reentrant checkpointing recomputes twice."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.errors import raises
from tests.run_ranks import run_ranks
from tests.worlds import world as world
from torch import Tensor, nn
from torch.optim import SGD, SparseAdam
from torch.utils.checkpoint import checkpoint

from paceline import ArrayDataset, BatchPlan, LoadingOptions, World, load_steps, train_step
from paceline.data.plan import virtual_ranks_of
from paceline.errors import UsageError
from paceline.strategies import STRATEGIES, Strategy

CPU = torch.device("cpu")
DENSE_ONLY = ["manual", "bucketed", "exact", "zero", "fsdp"]
ANY = [*DENSE_ONLY, "single", "dp", "ddp"]
IDS = torch.randint(40, (22,), generator=torch.Generator().manual_seed(0))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1).sum(1) - targets).square()


def train(replica: Strategy, inputs: Tensor = IDS, *, accumulation: int = 1) -> dict[str, Tensor]:
    world = replica.world
    data = ArrayDataset(inputs, torch.arange(22.0, dtype=torch.float64) / 9)
    plan, share = BatchPlan(22, 8, world.size, accumulation), virtual_ranks_of(world.size, world.rank, world.size)
    for step in load_steps(data, plan, share, LoadingOptions(CPU), start=0, stop=3):
        train_step(replica, step, loss)
    return {name: tensor.detach().clone() for name, tensor in replica.weights().items()}


# ---- sparse gradients --------------------------------------------------------------------------------------------


class Words(nn.Module):
    """`how`: a module with sparse=True, or the function F.embedding."""

    def __init__(self, how: str, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.how, self.sparse = how, sparse
        bag = nn.EmbeddingBag(40, 4, mode="sum", sparse=sparse)
        self.words = bag if how == "bag" else nn.Embedding(40, 4, sparse=sparse and how == "module")
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        if self.how == "function":
            x = F.embedding(ids, self.words.weight, sparse=self.sparse)  # pyright: ignore[reportArgumentType]
        else:
            x = self.words(ids[:, None] if self.how == "bag" else ids)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("name", DENSE_ONLY)
@pytest.mark.parametrize("how", ["module", "bag"])
def test_a_sparse_embedding_is_refused_by_name(world: World, name: str, how: str) -> None:
    with pytest.raises(UsageError, match=r"^words \(Embedding(Bag)?\) has sparse=True"):
        STRATEGIES[name](Words(how), partial(SGD, lr=0.1), world)


@pytest.mark.parametrize("name", DENSE_ONLY)
def test_one_that_is_not_trained_is_not_refused(world: World, name: str) -> None:
    model = Words("module")
    model.words.weight.requires_grad_(False)
    train(STRATEGIES[name](model, partial(SGD, lr=0.1), world))


@pytest.mark.parametrize("name", [*DENSE_ONLY, "ddp"])
def test_a_sparse_gradient_of_a_function_is_refused_in_the_first_step(world: World, name: str) -> None:
    replica = STRATEGIES[name](Words("function"), partial(SGD, lr=0.1), world)
    before = {key: tensor.clone() for key, tensor in replica.weights().items()}
    with pytest.raises(UsageError, match="sparse"):
        train(replica)
    assert all(torch.equal(before[key], tensor) for key, tensor in replica.weights().items())


@pytest.mark.parametrize("how", ["module", "bag", "function"])
@pytest.mark.parametrize("name", ["single", "dp", "ddp"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_where_sparse_gradients_work_they_are_right(world: World, name: str, how: str, accumulation: int) -> None:
    if name == "ddp" and how == "function":
        return  # refused
    dense = train(STRATEGIES["single"](Words(how, sparse=False), partial(SGD, lr=0.1), world))
    sparse = train(STRATEGIES[name](Words(how), partial(SGD, lr=0.1), world), accumulation=accumulation)
    torch.testing.assert_close(sparse, dense, rtol=1e-12, atol=1e-14)


def test_sparse_adam_works_where_sparse_gradients_do(world: World) -> None:
    def make(parameters: object) -> SparseAdam:
        del parameters
        return SparseAdam(model.words.parameters(), lr=0.1)

    model = Words("module")
    start = model.words.weight.detach().clone()
    train(STRATEGIES["ddp"](model, make, world))
    assert not torch.equal(model.words.weight, start)


@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_weights_that_a_forward_shrinks_are_refused_with_several_virtual_ranks(
    world: World, name: str, kind: Any
) -> None:
    model = nn.Sequential(kind(3, 2, max_norm=0.5))
    with raises("embedding-max-norm", max_norm=0.5):
        STRATEGIES[name](model, partial(SGD, lr=0.1), world, virtual_ranks=2)


# ---- lazy modules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(2), nn.LazyBatchNorm1d])
def test_a_module_without_a_shape_is_refused_by_name(world: World, name: str, make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), make())
    with raises("lazy-parameter", name="1.weight"):
        STRATEGIES[name](model, partial(SGD, lr=0.1), world)
    model = nn.Sequential(nn.Linear(3, 3), make())
    model(torch.ones(2, 3))
    STRATEGIES[name](model, partial(SGD, lr=0.1), world)


# ---- reentrant activation checkpointing --------------------------------------------------------------------------


class Again(nn.Module):
    """Uses weights twice. `how`: "tied", under two names; "reused", by one layer that is called twice."""

    def __init__(self, how: str, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.how = how
        self.first = nn.Linear(4, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        if how == "tied":
            self.head = nn.Linear(width, width, bias=False)
            self.head.weight = self.layers[-1].weight  # pyright: ignore[reportAttributeAccessIssue]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True).tanh()
        last = self.layers[-1] if self.how == "reused" else self.head
        return checkpoint(last, x, use_reentrant=True) / 10


WIDTH = 512  # a layer is 2 MiB: each bucket leaves when it is full


def reentrant(rank: int, size: int) -> dict[str, object]:
    world = World(rank, size, rank, size, CPU, "gloo")
    inputs = torch.randn(22, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found: dict[str, object] = {}
    for how in ("tied", "reused"):
        wanted: dict[str, Tensor] = {}
        for name in ("manual", "bucketed", "exact", "zero", "fsdp"):  # manual sums after backward
            replica = STRATEGIES[name](Again(how, WIDTH), partial(SGD, lr=0.001), world)
            try:
                got = train(replica, inputs)
            except UsageError as error:
                found[f"{name} {how}"] = "use_reentrant=False" in str(error)
                replica.reset()
                continue
            wanted = wanted or got
            found[f"{name} {how}"] = max(float((got[key] - tensor).abs().max()) for key, tensor in wanted.items())
    return found


@pytest.mark.ranks
def test_reentrant_checkpointing_of_weights_used_twice_is_right_or_refused(tmp_path: Path) -> None:
    for found in run_ranks(reentrant, 2, tmp_path):
        refused = {case for case, result in found.items() if result is True}
        assert refused == {"zero reused", "fsdp reused"}
        assert all(
            isinstance(result, float) and result < 1e-12 for case, result in found.items() if case not in refused
        )


def test_a_layer_that_is_recomputed_twice_without_reentrance_is_right_under_fsdp(world: World) -> None:
    class Once(Again):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in (*self.layers, self.layers[0]):
                x = checkpoint(layer, x, use_reentrant=False).tanh()
            return x

    inputs = torch.randn(22, 4, dtype=torch.float64)
    made = [STRATEGIES[name](Once("reused", 6), partial(SGD, lr=0.1), world) for name in ("single", "fsdp")]
    wanted, got = (train(replica, inputs) for replica in made)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
