"""Several ranks that read the results of a step in the next step act as ranks that read at once."""

import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.doubles.syncs import on_the_cpu
from tests.doubles.test_late import (
    FAILS,
    HUGE_GRADIENT,
    NAN_GRADIENT,
    NAN_LOSS,
    OPTIMIZERS,
    WritesInForward,
    broken_after,
    late_batches,
    normalized,
    recorded,
    spoiled,
)
from tests.run_ranks import run_ranks
from tests.train.test_nonfinite import bits
from tests.worlds import world_of
from torch import Tensor

from paceline import STRATEGIES, Schedule, Strategy, World, fit
from paceline.collectives.communicator import make_communicator
from paceline.data.loader import MicroBatch
from paceline.errors import StallError
from paceline.protocol.evidence import Phase
from paceline.rank.guard import HangGuard
from paceline.stepping.order import CollectiveOrderCheck
from paceline.stepping.totals import ControlFlags, DeferredTotals, TotalsReducer

pytestmark = pytest.mark.ranks

Report = tuple[list[str], int]
"""what one rank has reported, and the number of late steps; see `recorded`"""


def make_order(world: World, notices: list[str]) -> CollectiveOrderCheck:
    ledger = HangGuard.of_process().watch_torch().ledger
    ledger.take_order_hash()  # of earlier trainings of this process
    return CollectiveOrderCheck(world, ledger.take_order_hash, ledger.last_ordered_calls, notices.append)


def both_ways(rank: int, size: int, make: Callable[[World, bool], Report]) -> tuple[Report, Report]:
    """Reads at once, and late."""
    make_communicator("torch")  # gloo, as for tensors of a GPU
    world = world_of(rank, size)
    return make(world, False), make(world, True)


def alike(ranks: list[tuple[Report, Report]], lates: int) -> None:
    """All ranks have read `lates` steps late, and have reported what they report otherwise."""
    for (wanted, none), (found, number) in ranks:
        assert found == wanted
        assert none == 0 and number == lates


# ---- steps that are not finite, uneven batches

LATE_STEPS_OF_RANKS = 5  # 3, 4, 5, 7 and 8 of 9: the second step tells that all ranks can
CASES: list[tuple[str, str, int, int, float | None, Collection[int], float, bool]] = [
    ("bucketed", "adamw", 0, 12, None, (), 0.0, True),
    ("bucketed", "adamw", 0, 13, 0.5, (2, 3, 7), NAN_LOSS, True),
    ("bucketed", "momentum", 0, 14, None, (3,), NAN_GRADIENT, False),
    ("exact", "adamw", 4, 19, None, (3, 4), NAN_GRADIENT, True),
    ("exact", "amsgrad", 4, 18, 0.5, (2, 4, 5), NAN_LOSS, True),
    ("exact", "adamw", 4, 17, 0.5, (4,), HUGE_GRADIENT, False),
    ("ddp", "adamw", 0, 13, 0.5, (3, 7), NAN_GRADIENT, True),
    ("ddp", "sgd", 0, 12, None, (3,), NAN_LOSS, False),
]
"""strategy, optimizer, virtual ranks (0: the ranks), samples of a batch, clip, bad steps, how, whether to skip them"""


def case(number: int, world: World, late: bool) -> Report:
    strategy, optimizer, virtual_ranks, samples, clip, bad, kind, may_skip = CASES[number]
    return recorded(
        world, strategy, optimizer, bad, kind=kind, late=late, virtual_ranks=virtual_ranks or world.size, clip=clip,
        may_skip=may_skip, make_steps=partial(late_batches, size=samples), order=make_order(world, []),
    )  # fmt: skip


def all_cases(rank: int, size: int) -> list[tuple[Report, Report]]:
    return [both_ways(rank, size, partial(case, number)) for number in range(len(CASES))]


@pytest.mark.parametrize("size", [2, 3])
def test_late_steps_of_several_ranks_have_the_results_and_reports_of_others(size: int, tmp_path: Path) -> None:
    for found in run_ranks(all_cases, size, tmp_path):
        for number, ((wanted, none), (late, lates)) in enumerate(found):
            assert late == wanted, CASES[number]
            assert not none and lates >= 2, CASES[number]
        assert found[0][1][1] == LATE_STEPS_OF_RANKS


# ---- votes


def stopped(world: World, late: bool, *, early: int = 0) -> Report:
    """The last rank wants to stop in its fourth step, or `early`."""
    calls = 0

    def votes() -> ControlFlags:
        nonlocal calls
        calls += 1
        return ControlFlags(stop=float(world.rank == world.size - 1 and calls >= 5 - (late or early)))

    return recorded(world, "bucketed", "adamw", (), late=late, virtual_ranks=world.size, votes=votes)


def stops(rank: int, size: int) -> tuple[Report, Report]:
    return both_ways(rank, size, stopped)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_vote_of_one_rank_counts_one_step_later_on_all(size: int, tmp_path: Path) -> None:
    """In the late training the vote is in step 4, otherwise in step 5: both end after step 5, with the same state."""
    ranks = run_ranks(stops, size, tmp_path)
    alike(ranks, 2)  # steps 3 and 4
    assert all(wanted[-3].startswith("(5, ") for (wanted, _), _ in ranks)


# ---- the order of collectives


def first_sum(numbers: Tensor) -> None:
    dist.all_reduce(numbers)


def second_sum(numbers: Tensor) -> None:
    dist.all_reduce(numbers)


IN_FOURTH_STEP = 500.0


def marked_batches(*arguments: Any, size: int = 12) -> list[list[MicroBatch]]:
    steps = late_batches(*arguments, size)
    steps[3][0].targets[0] = IN_FOURTH_STEP
    return steps


class LossWith:
    """The losses, or with the weights that `act` returns. Its argument: whether it is the first body of step 4."""

    def __init__(self, act: Callable[[bool], Tensor | None]) -> None:
        self._act = act

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        losses, weights = spoiled(outputs, targets), self._act(bool(targets[0] == IN_FOURTH_STEP))
        return losses if weights is None else (losses, weights.expand_as(losses))


def recorded_with(act: Callable[[bool], Tensor | None], world: World, late: bool, **options: Any) -> Report:
    options.setdefault("make_steps", marked_batches)
    return recorded(
        world, "bucketed", "adamw", (), late=late, virtual_ranks=world.size, loss=LossWith(act), **options
    )  # fmt: skip


def swapped(world: World, late: bool) -> Report:
    def act(is_fourth: bool) -> None:
        sums = [first_sum, second_sum]
        for call in reversed(sums) if is_fourth and world.rank == world.size - 1 else sums:
            call(torch.ones(4))

    return recorded_with(act, world, late, order=make_order(world, []))


def branched(world: World, late: bool) -> Report:
    notices: list[str] = []

    def act(is_fourth: bool) -> None:
        first_sum(torch.ones(4))
        (second_sum if is_fourth and world.rank == 0 else first_sum)(torch.ones(3))

    found, lates = recorded_with(act, world, late, order=make_order(world, notices))
    return [*found, *notices], lates


def orders(rank: int, size: int) -> list[tuple[Report, Report]]:
    return [both_ways(rank, size, make) for make in (branched, swapped)]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_sums_of_different_collectives_are_never_applied(size: int, tmp_path: Path) -> None:
    for legal, wrong in run_ranks(orders, size, tmp_path):
        alike([legal], LATE_STEPS_OF_RANKS)
        alike([wrong], 2)
        assert len([text for text in wrong[0][0] if text.startswith("(")]) == 3  # records


# ---- conditions that differ between ranks


def hooked(world: World, late: bool) -> Report:
    """The last rank registers a hook of its optimizer in step 4. All know it after step 5, the last late step."""
    made: list[Strategy] = []

    def act(is_fourth: bool) -> None:
        if is_fourth and world.rank == world.size - 1:
            made[0].optimizer.register_step_pre_hook(lambda *_: None)

    def make_replica(*arguments: Any) -> Strategy:
        made.append(normalized(*arguments))
        return made[0]

    return recorded_with(act, world, late, make_replica=make_replica)


def weighed(samples: int, everywhere: bool, world: World, late: bool) -> Report:
    """In step 4 the last rank, or all, return weights, each of them 1."""

    def act(is_fourth: bool) -> Tensor | None:
        return torch.ones(1) if is_fourth and (everywhere or world.rank == world.size - 1) else None

    return recorded_with(act, world, late, make_steps=partial(marked_batches, size=samples))


def differing(rank: int, size: int) -> list[tuple[Report, Report]]:
    makers = [hooked, partial(weighed, 12, True), partial(weighed, 16, False), partial(weighed, 12, False)]
    return [both_ways(rank, size, make) for make in makers]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_for_which_a_condition_fails_differently_decide_alike(size: int, tmp_path: Path) -> None:
    ranks = run_ranks(differing, size, tmp_path)
    for number, lates in enumerate((3, 4, 4, 2)):
        alike([found[number] for found in ranks], lates)


def writing(bad: Collection[int], world: World, late: bool) -> Report:
    """The forward of the last rank writes into its batch from step 4 on."""

    def make_replica(*_: Any) -> Strategy:
        torch.manual_seed(0)
        model = WritesInForward(2 * 3 if world.rank == world.size - 1 else 1000)
        return STRATEGIES["bucketed"](model, OPTIMIZERS["adamw"], world, virtual_ranks=world.size)

    return recorded(
        world, "bucketed", "adamw", bad, late=late, virtual_ranks=world.size, make_replica=make_replica
    )  # fmt: skip


def writings(rank: int, size: int) -> list[tuple[Report, Report]]:
    return [both_ways(rank, size, partial(writing, bad)) for bad in ((), (4,))]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_whose_forward_writes_into_its_batch_ends_late_steps_on_all(size: int, tmp_path: Path) -> None:
    for rank, (good, (_, (found, _))) in enumerate(run_ranks(writings, size, tmp_path)):
        alike([good], 3)  # steps 3 to 5
        (error,) = [text for text in found if "computed again" in text or "failed" in text]
        assert ("computed again" in error) == (rank == size - 1)
        assert len([text for text in found if text.startswith("(")]) == 4


# ---- a rank that fails between


def failing(where: str, bad: Collection[int], world: World, late: bool) -> Report:
    is_last = world.rank == world.size - 1

    def fails(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets[0] == FAILS:
            raise OSError("the loss cannot be computed")
        return spoiled(outputs, targets)

    def make_steps(*arguments: Any) -> Any:
        steps = late_batches(*arguments)
        if is_last and where == "data":
            return broken_after(steps, 4)
        if is_last:
            steps[4][0].targets[0] = FAILS
        return steps

    return recorded(
        world, "bucketed", "adamw", bad, late=late, virtual_ranks=world.size, loss=fails, make_steps=make_steps,
        order=make_order(world, []),
    )  # fmt: skip


def fail(rank: int, size: int, where: str, bad: Collection[int], late: bool) -> tuple[Report, float]:
    make_communicator("torch")
    report, failed = failing(where, bad, world_of(rank, size), late), time.monotonic()
    if rank == size - 1:
        dist.destroy_process_group()  # as when the process ends
    return report, failed


@pytest.mark.parametrize("bad", [(), (3,)])
@pytest.mark.parametrize("where", ["data", "forward"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_no_rank_waits_for_one_that_fails_after_a_late_step(
    size: int, where: str, bad: Collection[int], tmp_path: Path
) -> None:
    """A step that must be repeated has no record then, because the ranks cannot repeat it."""
    wanted, found = (run_ranks(fail, size, tmp_path, where, bad, late) for late in (False, True))
    ends = [failed for _, failed in found]
    assert max(ends) - min(ends) < 10
    for ((before, _), _), ((after, lates), _) in zip(wanted, found, strict=True):
        assert lates >= 2
        records = [[text for text in report if text.startswith("(")] for report in (before, after)]
        assert len(records[0]) == 4 and records[1] == records[0][: 3 if bad else 4]
        assert after[-2] == before[-2]  # the state, which a skipped step has not changed


# ---- the guard


def aborted(rank: int, size: int) -> tuple[str, str, Phase]:
    """The guard aborts a collective of step 5 when the host has launched its update, before the device begins it."""
    make_communicator("torch")
    guard, phases, world = HangGuard.of_process(), list[Phase](), world_of(rank, size)
    replica, steps = normalized(world, "bucketed", "adamw", size), late_batches(world, size, (), 0.0)
    for _ in fit(replica, steps[:4], spoiled, schedule := Schedule(0.1, 9)):
        pass
    wanted = bits(replica)
    defer, step_unless = TotalsReducer.defer, Strategy.step_unless

    def deferred(self: TotalsReducer, totals: DeferredTotals) -> Any:
        if phases.count(Phase.OPTIMIZER) == 4:
            guard.before_abort()
        return defer(self, totals)

    def updated(self: Strategy, found_inf: Tensor) -> None:
        step_unless(self, found_inf)
        guard.page.put("released", int(phases.count(Phase.OPTIMIZER) == 5))

    with on_the_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TotalsReducer, "defer", deferred)
        patch.setattr(Strategy, "step_unless", updated)
        replica = normalized(world, "bucketed", "adamw", size)
        records = fit(replica, steps, spoiled, schedule, may_defer_read=lambda step: True, enter=phases.append)
        with pytest.raises(StallError):
            for _ in records:
                pass
    return wanted, bits(replica), phases[-1]


def test_the_device_does_not_apply_a_late_step_that_the_guard_has_aborted(tmp_path: Path) -> None:
    for wanted, found, phase in run_ranks(aborted, 2, tmp_path):
        assert found == wanted
        assert phase is not Phase.OPTIMIZER  # a rank saves this state
