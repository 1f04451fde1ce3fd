"""A training's state belongs to no strategy and no world size: any of them goes on where any other stopped."""

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.errors import raises
from tests.run_ranks import run_ranks
from tests.strategies.shampoo import Shampoo, muon_and_adamw
from tests.worlds import world_of, worlds
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from paceline import ArrayDataset, BatchPlan, LoadingOptions, World, load_steps, train_step
from paceline.checkpoint.shards import (
    ShardFileSource,
    gather_full_state,
    make_shard_layout,
    read_shard_file_metadata,
    select_shards_to_save,
    serialize_shard_file,
)
from paceline.checkpoint.state import TensorShard
from paceline.data.plan import virtual_ranks_of
from paceline.strategies import STRATEGIES, Strategy
from paceline.strategies.optimizers import full_optimizer_state, load_optimizer

CPU = torch.device("cpu")
VIRTUAL, SAVED_AT, STEPS = 4, 3, 5
NAMES = ("manual", "bucketed", "ddp", "exact", "zero", "fsdp")
SAME_BITS = ("exact", "zero")
SIZES = (1, 2, 3)
SIZE_PAIRS = ((2, 1), (1, 3), (3, 2), (2, 3), (1, 2), (3, 1), (2, 2))
OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "nadam": (optim.NAdam, {"lr": 0.01}),  # keeps two counters for each parameter
    "muon": (muon_and_adamw, {"lr": 0.02}),
    "shampoo": (Shampoo, {"lr": 0.05}),
}
TOLERANCE = {"sgd": 1e-12, "adamw": 1e-9, "muon": 1e-9, "shampoo": 1e-9}


class Model(nn.Module):
    """Batch norm, dropout, a scalar and a frozen parameter; no bias before batch norm, whose gradient is only noise."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Conv1d(3, 4, 1, bias=False)
        self.layers = nn.Sequential(
            nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3), nn.Conv1d(4, 5, 2, bias=False),
            nn.BatchNorm1d(5, momentum=None), nn.Tanh(), nn.Flatten(), nn.Linear(15, 7), nn.Tanh(), nn.Linear(7, 1),
        )  # fmt: skip
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3, 1), requires_grad=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.first(x + self.frozen)) * self.scale


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def data() -> ArrayDataset:
    """22 samples: the last batch of an epoch has 2, so that two of four virtual ranks get nothing."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(22, 3, 4, generator=generator, dtype=torch.float64)
    return ArrayDataset(inputs, inputs.sum((1, 2)).sin())


def prepared(name: str, optimizer: str, world: World, seed: int) -> Strategy:
    kind, options = OPTIMIZERS[optimizer]
    return STRATEGIES[name](Model(seed), lambda p: kind(p, **options), world, virtual_ranks=VIRTUAL)


def train(replica: Strategy, start: int, stop: int) -> None:
    world = replica.world
    share = virtual_ranks_of(VIRTUAL, world.rank, world.size)
    for step in load_steps(data(), BatchPlan(22, 10, VIRTUAL), share, LoadingOptions(CPU), start=start, stop=stop):
        train_step(replica, step, squared)


def save(held: list[TensorShard], path: Path, rank: int = 0, world_size: int = 1) -> None:
    """As `train.checkpointing` does: this rank's part as a file of its own."""
    places = make_shard_layout(select_shards_to_save(held, rank, world_size))
    buffer = torch.zeros(places.total_bytes, dtype=torch.uint8)
    serialize_shard_file(buffer, places, {})
    path.write_bytes(buffer.numpy().tobytes())


def opened(paths: Iterable[Path]) -> ShardFileSource:
    files = [(path, read_shard_file_metadata(path)) for path in paths]
    return ShardFileSource([(path, meta[1]) for path, meta in files if meta])


def path_of(folder: str, name: str, optimizer: str, rank: int, size: int) -> Path:
    return Path(folder) / f"{name}-{optimizer}-{rank}-of-{size}"


def save_all(rank: int, size: int, folder: str) -> None:
    """Train and save with every strategy; rank 0 alone also trains on, without a stop, for the others to compare."""
    world = world_of(rank, size)
    for name, optimizer in product(NAMES, OPTIMIZERS):
        if optimizer not in TOLERANCE and name not in SAME_BITS:
            continue
        replica = prepared(name, optimizer, world, seed=7)
        train(replica, 0, SAVED_AT)
        save(replica.state(), path_of(folder, name, optimizer, rank, size), rank, size)
        if (name, size) == ("exact", 1):
            train(replica, SAVED_AT, STEPS)
            save(replica.state(), path_of(folder, "uninterrupted", optimizer, 0, 1))


def cases() -> list[tuple[str, str, str, int, int]]:
    """(from, to, optimizer, world size then, world size now): a sample for each pair, a larger one of equal bits."""
    found: list[tuple[str, str, str, int, int]] = []
    for (row, first), (column, second) in product(enumerate(NAMES), enumerate(NAMES)):
        same_bits = {first, second} <= {*SAME_BITS}
        for optimizer in OPTIMIZERS if same_bits else [[*TOLERANCE][(row + column) % len(TOLERANCE)]]:
            at = len(found)
            found += [
                (first, second, optimizer, *SIZE_PAIRS[(at + step) % len(SIZE_PAIRS)])
                for step in ((0, 2, 4) if same_bits else (0,))
            ]
    return found


def go_on(rank: int, size: int, folder: str) -> int:
    """Load into every strategy what this or another one has saved, train on, and compare all there is."""
    done = 0
    world = world_of(rank, size)
    for first, second, optimizer, size_then, size_now in cases():
        if size_now != size:
            continue
        source = opened(path_of(folder, first, optimizer, r, size_then) for r in range(size_then))
        wanted = opened([path_of(folder, "uninterrupted", optimizer, 0, 1)])
        replica = prepared(second, optimizer, world, seed=99)
        replica.load(source)
        train(replica, SAVED_AT, STEPS)
        found = gather_full_state(replica.state(), world)
        case = f"{first} on {size_then} -> {second} on {size_now}, {optimizer}"
        assert list(found) == wanted.names(""), case
        for name, tensor in found.items():
            other = wanted.tensor(name)
            assert other is not None
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), (case, name)
            if {first, second} <= {*SAME_BITS}:
                bits = [t.flatten().view(torch.uint8) for t in (tensor, other)]
                assert torch.equal(*bits), (case, name)
            else:
                tolerance = TOLERANCE[optimizer]
                torch.testing.assert_close(
                    tensor, other, rtol=tolerance, atol=tolerance, msg=lambda m, at=(case, name): f"{at}: {m}"
                )
        done += 1
    return done


def everything(rank: int, world_size: int, folder: str) -> int:
    for size in worlds(rank, SIZES, f"{folder}/first"):
        save_all(rank, size, folder)
    return sum(go_on(rank, size, folder) for size in worlds(rank, SIZES, f"{folder}/second"))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(450)
def test_any_strategy_goes_on_where_any_other_stopped_at_any_world_size(tmp_path: Path) -> None:
    done = run_ranks(everything, max(SIZES), tmp_path, str(tmp_path), timeout=420)
    assert done[0] == len(cases())  # rank 0 is in every world


# ---- what an optimizer may keep, in one process


@pytest.fixture(scope="module", autouse=True)
def first_optimizer() -> None:
    """What torch imports for it outlives a test."""
    Keeping([torch.zeros(1)])


class Keeping(Optimizer):
    """Keeps for each parameter whatever it is told to."""

    def __init__(self, params: Iterable[Tensor], kept: dict[str, Any] | None = None) -> None:
        super().__init__(params, {})
        for group in self.param_groups:
            for parameter in group["params"]:
                if kept is not None:
                    self.state[parameter] = dict(kept)


def test_plain_numbers_come_back_as_plain_numbers_and_none_is_left_out(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    memory = torch.arange(4.0, dtype=torch.float64)
    kept = {"count": 2**62 + 1, "rate": 0.1, "on": True, "nothing": None, "memory": memory, "inf": float("inf")}
    save(full_optimizer_state(model, Keeping(model.parameters(), kept)), tmp_path / "file")
    optimizer = Keeping(model.parameters(), {"old": 5})
    source = opened([tmp_path / "file"])
    names = {name.rpartition("/")[2] for name in source.names("optimizer/weight/")}
    assert names == {"count.item", "rate.item", "on.item", "inf.item", "memory"}
    load_optimizer(model, optimizer, source)
    for parameter in model.parameters():
        state = dict(optimizer.state[parameter])
        assert torch.equal(state.pop("memory"), memory)
        assert state == {"count": 2**62 + 1, "rate": 0.1, "on": True, "inf": float("inf")}
        assert (type(state["count"]), type(state["rate"])) == (int, float)


def test_a_parameter_that_was_never_updated_has_no_state_afterwards(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer = Keeping(model.parameters())
    optimizer.state[model.bias] = {"count": 1}
    save(full_optimizer_state(model, optimizer), tmp_path / "file")
    other = Keeping(model.parameters(), {"count": 9})
    load_optimizer(model, other, opened([tmp_path / "file"]))
    assert other.state == {model.bias: {"count": 1}}


@pytest.mark.parametrize("value", ["text", [1.0], {"a": 1}, (torch.ones(1),), 1j], ids=repr)
def test_what_only_a_pickle_could_save_is_refused_by_name(value: object) -> None:
    model = nn.Linear(2, 3)
    with raises("optimizer-keeps-object", kind=type(value).__name__, key="odd", name="weight"):
        full_optimizer_state(model, Keeping([model.weight], {"odd": value}))


def test_an_optimizer_of_foreign_parameters_is_refused() -> None:
    foreign = nn.Parameter(torch.ones(4, 2))
    with raises("foreign-parameter-state", shape=(4, 2)):
        full_optimizer_state(nn.Linear(2, 3), Keeping([foreign], {"count": 1}))


def test_the_state_of_another_model_is_refused_and_the_tensor_named(tmp_path: Path) -> None:
    def single(model: nn.Module) -> Strategy:
        return STRATEGIES["single"](model, Keeping, world_of(0, 1))

    save(single(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))).state(), tmp_path / "file")
    source = opened([tmp_path / "file"])
    linear = nn.Linear(2, 3)
    for model, name, shape, dtype, found in (
        (nn.Sequential(nn.Linear(2, 4)), "model/0.weight", (4, 2), torch.float32, "(3, 2) torch.float32"),
        (nn.Sequential(nn.Linear(2, 3).double()), "model/0.weight", (3, 2), torch.float64, "(3, 2) torch.float32"),
        (nn.Sequential(linear, nn.Linear(3, 1)), "model/1.weight", (1, 3), torch.float32, "(3,) torch.float32"),
        (
            nn.Sequential(linear, nn.BatchNorm1d(3), nn.Linear(3, 1)),
            "model/2.weight", (1, 3), torch.float32, "nothing",
        ),
    ):  # fmt: skip
        with raises("state-does-not-fit", name=name, shape=shape, dtype=dtype, found=found):
            single(model).load(source)
