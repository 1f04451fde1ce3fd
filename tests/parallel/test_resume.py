"""A run goes on with every other strategy, and mesh, where one has stopped: with the numbers of one process."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parallel.models import GPT, loss, sentences, task
from tests.run_ranks import run_ranks
from torch import Tensor, optim

from paceline import BatchPlan, LoadingOptions, World, load_steps, train_step
from paceline.checkpoint.shards import (
    ShardFileSource,
    gather_full_state,
    make_shard_layout,
    read_shard_file_metadata,
    select_shards_to_save,
    serialize_shard_file,
)
from paceline.config.mesh import Mesh
from paceline.data.plan import virtual_ranks_of
from paceline.rank.world import create_mesh_groups
from paceline.strategies import STRATEGIES, Strategy
from paceline.train.parallelism import ModelParallelPlan, ParallelConfig, parallelize_model

WAYS = ("bucketed", "exact", "zero", "fsdp", "tensor=2", "pipeline=2", "context=2")
OF_FOUR = (
    *WAYS[:4],
    "tensor=4",
    "data=2,tensor=2",
    "data=2,pipeline=2",
    "shard=2,tensor=2",
    "data=2,context=2",
    "shard=2,context=2",
)
PLAN = BatchPlan(48, 11, 4, accumulation=2)
VIRTUAL, SAVED_AT, STEPS = 4, 2, 4


def prepared(way: str, world: World, seed: int) -> Strategy:
    torch.manual_seed(seed)
    model, strategy, sharing = GPT().double(), way, ModelParallelPlan()
    if "=" in way:
        world, strategy = create_mesh_groups(world, Mesh.parse(way)), "fsdp" if "shard" in way else "bucketed"
        data, loading = sentences("train"), LoadingOptions(world.device)
        sharing = parallelize_model(task, model, data, loading, PLAN, world, ParallelConfig(strategy))

    def maker(parameters: Any) -> optim.Optimizer:
        return optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)

    return sharing.make_strategy(STRATEGIES[strategy], model, maker, world, VIRTUAL)


def train(replica: Strategy, start: int, stop: int) -> None:
    data = replica.world.data
    share = virtual_ranks_of(VIRTUAL, data.rank, data.size)
    replica.model.train()
    for step in load_steps(
        sentences("train"), PLAN, share, LoadingOptions(replica.world.device), start=start, stop=stop
    ):
        train_step(replica, step, loss, max_norm=0.5)


def saved(replica: Strategy, folder: str, name: str) -> list[tuple[Path, Any]]:
    """As a run saves it: a file of each rank."""
    world = replica.world
    places = make_shard_layout(select_shards_to_save(replica.state(), world.rank, world.size))
    buffer = torch.zeros(places.total_bytes, dtype=torch.uint8)
    serialize_shard_file(buffer, places, {})
    Path(folder, f"{name}-{world.rank}").write_bytes(buffer.numpy().tobytes())
    gather_full_state([], world)  # all have written
    torch.distributed.barrier()
    return [
        (path, (read_shard_file_metadata(path) or ((), ()))[1])
        for path in (Path(folder, f"{name}-{r}") for r in range(world.size))
    ]


def go_on(rank: int, size: int, folder: str, pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """By pair the largest difference to a run that has not stopped."""
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    uninterrupted = prepared("bucketed", world, 0)
    train(uninterrupted, 0, STEPS)
    wanted = gather_full_state(uninterrupted.state(), world)
    files: dict[str, Any] = {}
    found: dict[str, float] = {}
    for first, second in pairs:
        if first not in files:
            replica = prepared(first, world, 0)
            train(replica, 0, SAVED_AT)
            files[first] = saved(replica, folder, first)
        replica = prepared(second, world, 99)
        replica.load(ShardFileSource(files[first]))
        train(replica, SAVED_AT, STEPS)
        got = gather_full_state(replica.state(), world)
        assert got.keys() == wanted.keys()
        found[f"{first} -> {second}"] = max(_apart(got[name], tensor) for name, tensor in wanted.items())
    return found


def _apart(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    if not want.numel():  # how a buffer is merged is saved by name alone
        return 0.0
    return float((got.double() - want.double()).abs().max())


@pytest.mark.slow
@pytest.mark.ranks
def test_a_mesh_goes_on_where_a_strategy_has_stopped_and_the_other_way_round(tmp_path: Path) -> None:
    pairs = [
        ("tensor=2", "zero"),
        ("fsdp", "tensor=2"),
        ("tensor=2", "pipeline=2"),
        ("pipeline=2", "exact"),
        ("exact", "context=2"),
        ("context=2", "tensor=2"),
    ]
    for pair, apart in run_ranks(go_on, 2, tmp_path, str(tmp_path), pairs)[0].items():
        assert apart < 1e-9, pair


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_pairs(ranks: int, tmp_path: Path) -> None:
    ways = WAYS if ranks == 2 else OF_FOUR
    found = run_ranks(go_on, ranks, tmp_path, str(tmp_path), [*product(ways, ways)], timeout=1740)[0]
    assert len(found) == len(ways) ** 2
    assert max(found.values()) < 1e-9, found
