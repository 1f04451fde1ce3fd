"""A step that reads once at its end, as on a GPU, gives the results of the CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.doubles.syncs import on_the_cpu
from tests.run_ranks import run_ranks
from tests.train.test_nonfinite import BAD, CPU, MANY, batches, bits, good, made, of_ranks, rooted
from tests.worlds import world as world
from torch import Tensor

from paceline import Strategy, World
from paceline.collectives.control import are_finite
from paceline.data.loader import PrefetchTrigger
from paceline.errors import PacelineError, StallError
from paceline.rank.guard import HangGuard
from paceline.stepping.totals import StepTotals
from paceline.train.step import TaskSteps


def trained(world: World, name: str, clip: float | None) -> tuple[Strategy, list[float | None]]:
    replica = made(name, world, 2)
    take = TaskSteps(replica, good, max_norm=clip).take_step
    results = [take(step) for step in batches(world, 2, batch=8)]
    return replica, [number for one in results for number in (one.loss, one.total_weight, one.grad_norm)]


def of_strategies(rank: int, size: int) -> dict[str, bool]:
    world, found = World(rank, size, rank, size, CPU, "gloo"), dict[str, bool]()
    for name in MANY:
        for clip in (None, 0.5):
            early, numbers = trained(world, name, clip)
            with on_the_cpu():
                late, the_same = trained(world, name, clip)
            found[f"{name} {clip}"] = bits(early) == bits(late) and numbers == the_same
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_every_strategy_comes_to_the_same_bits(tmp_path: Path) -> None:
    for found in run_ranks(of_strategies, 2, tmp_path):
        assert len(found) == 2 * len(MANY) and all(found.values()), found


def named(rank: int, size: int, folder: str) -> dict[str, Any]:
    with on_the_cpu():
        return of_ranks(rank, size, folder)


@pytest.mark.ranks
@pytest.mark.slow
def test_who_made_a_step_bad_is_found_as_early(tmp_path: Path) -> None:
    meeting = str(tmp_path / "meeting")
    assert run_ranks(named, 2, tmp_path, meeting) == run_ranks(of_ranks, 2, tmp_path, f"{meeting}-2")


def weightless(outputs: Tensor, targets: Tensor) -> Any:
    return good(outputs, targets), torch.zeros_like(targets)


def unbounded(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.where(targets == 0, torch.inf, good(outputs, targets))


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(
    ("loss", "words"),
    [(rooted, "the gradient of all 2"), (unbounded, "the loss is not finite"), (weightless, "sum to 0")],
)
def test_what_is_wrong_changes_nothing(world: World, loss: Callable[..., Any], words: str, clip: float | None) -> None:
    (step,) = batches(world, 2)
    told: list[str] = []
    for around in (nullcontext, on_the_cpu):
        replica = made("exact", world, 2)
        TaskSteps(replica, good).take_step(step)  # so that buffers and moments are there
        before = bits(replica)
        with around(), pytest.raises(PacelineError, match=words) as caught:
            TaskSteps(replica, loss, max_norm=clip).take_step(step)
        assert bits(replica) == before
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert loss is weightless or all(str(sample) in told[0] for sample in BAD)


def test_a_freed_rank_believes_nothing_that_it_has_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (step,) = batches(world, 2)
    replica = made("exact", world, 2)
    TaskSteps(replica, good).take_step(step)
    before, heard = bits(replica), list[str]()

    def freed(guard: HangGuard) -> None:
        raise StallError("freed")

    monkeypatch.setattr(HangGuard, "check_unblocked", freed)
    monkeypatch.setattr("paceline.stepping.totals.StepTotals.read_totals", lambda self, totals: heard.append("totals"))
    with on_the_cpu(), pytest.raises(StallError):
        TaskSteps(replica, good, max_norm=1.0).take_step(step)
    assert bits(replica) == before
    assert not heard


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_gradients_of_several_types_are_looked_at_at_once(bad: float) -> None:
    gradients = [torch.full((100,), 3e4, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)]
    with on_the_cpu():
        assert are_finite([*gradients, torch.full((100,), 3e38)], CPU).numbers.tolist() == [0.0]  # nothing overflows
        for gradient in gradients:
            gradient[7] = bad
            assert not are_finite(gradients, CPU).result()
            gradient[7] = 1


def test_the_next_batches_are_begun_while_the_device_is_busy_with_the_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (step,), said, ahead = batches(world, 2), list[str](), PrefetchTrigger()
    replica = made("exact", world, 2)
    ahead.start_batches = lambda: said.append("begin")
    freed, start = HangGuard.check_unblocked, StepTotals.start
    monkeypatch.setattr(HangGuard, "check_unblocked", lambda self: (said.append("read"), freed(self)))
    monkeypatch.setattr(StepTotals, "start", lambda self: (said.append("last backward"), start(self))[1])
    replica.optimizer.register_step_pre_hook(lambda *_: said.append("update"))
    for around, wanted in (
        (on_the_cpu, ["last backward", "begin", "read", "read", "update"]),  # the last read looks again
        (nullcontext, ["last backward", "read", "update"]),
    ):
        with around():
            TaskSteps(replica, good, ahead=ahead).take_step(step)
        assert [*said] == wanted
        said.clear()
