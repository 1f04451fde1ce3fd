"""Trainings on a GPU in Python: no operation mixes devices, and the bits are those of the CPU."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.doubles import gpu
from tests.doubles.syncs import line_of_ours
from tests.run_ranks import run_ranks
from torch import nn

from paceline import STRATEGIES, BatchPlan, LoadingOptions, Schedule, fit, load_steps, virtual_ranks_of
from paceline.checkpoint.shards import gather_full_state, hash_tensors
from paceline.collectives.control import Deferred, scale_and_check_gradients
from paceline.data.arrays import ArrayDataset
from paceline.rank.guard import HangGuard
from paceline.rank.world import World
from paceline.seeding import fork_rng_with_seed
from paceline.stepping.order import CollectiveOrderCheck

VIRTUAL_RANKS = 2


def model(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(4 * 36, 10)
    )


def trained(rank: int, size: int, strategy: str, where: str, dropout: float = 0.0) -> list[Any]:
    if where == "gpu":
        gpu.install()
    torch.manual_seed(3)
    data = ArrayDataset(torch.randn(44, 1, 8, 8), torch.randint(0, 10, (44,)))
    world = World(rank, size, rank, size, gpu.device() if where == "gpu" else gpu.CPU, "gloo")
    make = partial(torch.optim.AdamW, fused=True)
    replica = STRATEGIES[strategy](model(dropout).to(world.device), make, world, virtual_ranks=VIRTUAL_RANKS)
    plan = BatchPlan(len(data), 13, VIRTUAL_RANKS, 2)
    batches = load_steps(
        data, plan, virtual_ranks_of(VIRTUAL_RANKS, rank, size), LoadingOptions(world.device), start=0, stop=8
    )
    loss = partial(F.cross_entropy, reduction="none")
    losses = [record.result.loss for record in fit(replica, batches, loss, Schedule(1e-2, 8), max_norm=1.0)]
    devices = {tensor.device.type for tensor in replica.model.state_dict().values()}
    return [hash_tensors(gather_full_state(replica.state(), world)), losses, sorted(devices)]


def both(size: int, folder: Path, strategy: str) -> None:
    (folder / "cpu").mkdir()
    (folder / "gpu").mkdir()
    cpu = run_ranks(trained, size, folder / "cpu", strategy, "cpu")
    found = run_ranks(trained, size, folder / "gpu", strategy, "gpu")
    assert [one[:2] for one in found] == [one[:2] for one in cpu]
    assert cpu[0][2] == ["cpu"] and found[0][2] == [gpu.NAME]  # all tensors are on the device


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["exact", "zero", *(pytest.param(name, marks=pytest.mark.soak) for name in ("manual", "bucketed", "ddp", "fsdp"))],
)
def test_two_ranks_on_a_device_give_the_bits_of_the_cpu(strategy: str, tmp_path: Path) -> None:
    both(2, tmp_path, strategy)


@pytest.mark.ranks
def test_dropout_draws_from_the_devices_own_stream_and_is_the_same_on_one_rank_and_two(tmp_path: Path) -> None:
    found = [
        run_ranks(trained, size, folder, "exact", where, 0.5)[0][0]
        for size, where in ((1, "gpu"), (2, "gpu"), (1, "cpu"))
        if not (folder := tmp_path / f"{where}-{size}").mkdir()
    ]
    assert found[0] == found[1]


def drawn(rank: int, size: int) -> list[list[float]]:
    gpu.install()
    there = gpu.device()

    def draw() -> list[float]:
        return torch.rand(4, device=there).tolist()

    def seeded(seed: int) -> list[float]:
        with fork_rng_with_seed(seed, there):
            return draw()

    torch.get_device_module(there).manual_seed(5)
    before = draw()
    torch.get_device_module(there).manual_seed(5)
    return [seeded(1), seeded(2), seeded(1), draw(), before]


@pytest.mark.ranks
def test_a_random_stream_on_a_device_is_that_of_its_seed_and_leaves_the_devices_own_as_it_was(tmp_path: Path) -> None:
    one, two, again, outside, before = run_ranks(drawn, 1, tmp_path)[0]
    assert one == again != two
    assert outside == before


def mixed(rank: int, size: int) -> list[str]:
    gpu.install()
    here, there = torch.ones(3), torch.ones(3, device=gpu.device())
    said: list[str] = []
    for wrong in (
        lambda: here + there,
        lambda: here[there.long()],
        lambda: there.numpy(),
        lambda: torch.cat([here, there]),
    ):
        try:
            wrong()
        except (RuntimeError, TypeError) as error:
            said.append(str(error).partition(" (")[0])
    assert (there * torch.tensor(2.0)).tolist() == [2.0] * 3  # a scalar may be on the CPU
    assert there[torch.tensor([0, 2])].device == gpu.device() and there.cpu().device == gpu.CPU
    view = there[1:]
    view += 1
    assert there.tolist() == [1.0, 2.0, 2.0] and there.data_ptr() != view.data_ptr()
    return said


@pytest.mark.ranks
def test_what_mixes_devices_is_an_error(tmp_path: Path) -> None:
    said = run_ranks(mixed, 1, tmp_path)[0]
    assert len(said) == 4 and sum("same device" in words for words in said) == 3, said


def waits(rank: int, size: int, strategy: str, late: bool) -> dict[str, int]:
    """How often 100 steps make the host wait for the device, by the line that waits."""
    gpu.install()
    lines: Counter[str] = Counter()
    compute = gpu.run

    def counted(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_source = any(isinstance(value, gpu.OnGpu) for value in args[:1])
        if func is gpu.aten._to_copy.default:
            is_target = torch.device(kwargs.get("device") or args[0].device).type == gpu.NAME
            lines[line_of_ours()] += is_target != is_source and not kwargs.get("non_blocking")
        elif func is gpu.aten.copy_.default:
            lines[line_of_ours()] += isinstance(args[1], gpu.OnGpu) != is_source and args[2:] != (True,)
        elif func in (gpu.aten._local_scalar_dense.default, gpu.aten.equal.default, gpu.aten.nonzero.default):
            lines[line_of_ours()] += is_source
        return compute(func, args, kwargs)

    world = World(rank, size, rank, size, gpu.device(), "gloo")
    torch.manual_seed(1)
    data = ArrayDataset(torch.randn(4 * 104, 1, 8, 8), torch.randint(0, 10, (4 * 104,)))
    make = partial(torch.optim.AdamW, fused=True)
    replica = STRATEGIES[strategy](model(0.1).to(world.device), make, world)
    plan = BatchPlan(len(data), 4, size)
    batches = load_steps(data, plan, range(rank, rank + 1), LoadingOptions(world.device), start=0, stop=104)
    loss = partial(F.cross_entropy, reduction="none")
    ledger = HangGuard.of_process().watch_torch().ledger
    records = fit(
        replica, batches, loss, Schedule(1e-2, 104), max_norm=1.0, may_defer_read=(lambda step: True) if late else None,
        order=CollectiveOrderCheck(world, ledger.take_order_hash, ledger.last_ordered_calls, print),
    )  # fmt: skip
    while next(records).step < 3:
        pass
    gpu.run = counted
    while next(records).step < 103:
        pass
    return {line: number for line, number in lines.items() if number}


def scaled(rank: int, size: int) -> list[list[float]]:
    gpu.install()
    parameter = nn.Parameter(torch.ones(2, device=gpu.device()))
    parameter.grad = torch.full((2,), 1e38, device=gpu.device())
    factors = (0.5, 4.0, 2.0)  # 4e38 is infinite
    looks = [scale_and_check_gradients([parameter], factor, gpu.device()) for factor in factors]
    return [look.numbers.tolist() for look in looks if isinstance(look, Deferred)]


@pytest.mark.ranks
def test_the_device_sees_a_gradient_that_overflows_when_it_is_scaled(tmp_path: Path) -> None:
    assert run_ranks(scaled, 1, tmp_path) == [[[0.0], [0.0], [1.0]]]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("single", 1), ("bucketed", 2),
        *(pytest.param(s, n, marks=pytest.mark.slow) for s, n in (("exact", 2), ("ddp", 2), ("exact", 3))),
    ],
)  # fmt: skip
def test_100_late_steps_never_wait_for_the_device(strategy: str, size: int, tmp_path: Path) -> None:
    for late in (False, True):
        (tmp_path / str(late)).mkdir()
        for found in run_ranks(waits, size, tmp_path / str(late), strategy, late):
            if strategy == "ddp":
                found.pop("elsewhere")  # torch's buckets are not on this device
            assert sum(found.values()) == (0 if late else 100), found
