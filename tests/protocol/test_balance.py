"""--balance: the numbers of virtual ranks follow the speeds, and only a lasting difference restarts the ranks."""

import itertools
import os
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.errors import raises

from paceline.protocol.balance import (
    SAMPLE_SECONDS,
    SKIPPED_STEPS,
    STEADY_SECONDS,
    WINDOW_STEPS,
    AutoBalancer,
    assign_virtual_ranks,
    expand_to_rank_speeds,
    parse_balance,
)
from paceline.protocol.evidence import Phase, RankSample
from paceline.protocol.status_page import StatusPage, make_status_page, read_counters
from paceline.runs.progress import ThroughputMeter
from paceline.train.progress import TrainingProgress
from paceline.train.step_record import StepRecord


def test_no_other_assignment_makes_the_slowest_rank_faster() -> None:
    draw = random.Random(0)
    for attempt in range(400):
        speeds = [draw.uniform(0.2, 3) for _ in range(draw.randint(1, 4))]
        virtual_ranks = draw.randint(len(speeds), 9)
        limits = [draw.randint(1, virtual_ranks) for _ in speeds] if attempt % 2 else [virtual_ranks] * len(speeds)
        limits[draw.randrange(len(speeds))] += max(0, virtual_ranks - sum(limits))  # they allow one assignment at least
        shares = assign_virtual_ranks(virtual_ranks, len(speeds), speeds, limits if attempt % 2 else ())
        assert [v for share in shares for v in share] == [*range(virtual_ranks)] and all(shares)

        def seconds(numbers: Sequence[int], speeds: Sequence[float] = speeds) -> float:
            return max(number / speed for number, speed in zip(numbers, speeds, strict=True))

        others = itertools.product(*(range(1, limit + 1) for limit in limits))
        best = min(seconds(numbers) for numbers in others if sum(numbers) == virtual_ranks)
        assert seconds([len(share) for share in shares]) == best
        assert all(len(share) <= limit for share, limit in zip(shares, limits, strict=True))


def test_speeds_are_of_ranks_or_of_nodes() -> None:
    assert parse_balance("auto") == parse_balance(None) == ()
    assert expand_to_rank_speeds(parse_balance("3:1.5"), [1, 1]) == (3, 1.5)
    assert expand_to_rank_speeds((3, 1), [2, 2]) == (3, 3, 1, 1)
    with raises("balance-count", ranks=4, nodes=2):
        expand_to_rank_speeds((3, 1, 1), [2, 2])


@pytest.mark.parametrize("text", ["", "3", "3:", "3:0", "-1:2", "a:b", "1e9:1", "nan:1"])
def test_a_wrong_ratio_is_an_error(text: str) -> None:
    with raises("balance-invalid", value=text):
        parse_balance(text)


class Run:
    """Ranks that need `seconds[rank]` for a virtual rank. Their agent takes a sample in each quarter of a second."""

    def __init__(self, *seconds: float, virtual_ranks: int = 12, resumes_at: int = 0) -> None:
        self.seconds, self.virtual_ranks, self.meter, self.step = [*seconds], virtual_ranks, AutoBalancer(), resumes_at
        self.update_seconds = 0.0
        self.limits: Sequence[int] = [0] * len(seconds)
        self.noise: Callable[[int], float] = lambda rank: 1.0
        self.clock_seconds, self.next_sample_seconds = 0.0, SAMPLE_SECONDS / 2
        self.start()

    def start(self) -> None:
        self.meter.start([*range(len(self.seconds))])
        self.shares = assign_virtual_ranks(max(self.virtual_ranks, 2), len(self.seconds), self.meter.speeds)
        self.spent = [[0.0] * len(Phase) for _ in self.seconds]
        self.speeds, self.left_steps = self.meter.speeds, 0
        self.shown_step = 0  # also after a resume, until its first step is done

    def samples(self) -> list[RankSample]:
        return [
            RankSample(
                rank, "n", 1, step=self.shown_step, phase_seconds=(*spent,), virtual_ranks=self.virtual_ranks,
                max_virtual_ranks=limit,
            )
            for rank, (spent, limit) in enumerate(zip(self.spent, self.limits, strict=True))
        ]  # fmt: skip

    def takes(self, steps: int) -> int:
        """Take these steps, or fewer until the ranks restart with another assignment. Returns how many; 0: no restart.

        The ranks vote for the end in the step after that of the decision.
        """
        for taken in range(1, steps + 1):
            spent = [[*seconds] for seconds in self.spent]
            times = [
                len(share) * seconds * self.noise(rank)
                for rank, (share, seconds) in enumerate(zip(self.shares, self.seconds, strict=True))
            ]
            for rank, time in enumerate(times):
                spent[rank][Phase.FORWARD] += time / 3
                spent[rank][Phase.BACKWARD] += time * 2 / 3 + max(times) - time  # under zero it waits for others
                spent[rank][Phase.OPTIMIZER] += self.update_seconds
            self.clock_seconds += max(times) + self.update_seconds
            while self.next_sample_seconds < self.clock_seconds:  # during this step
                self.next_sample_seconds += SAMPLE_SECONDS
                if not self.left_steps and self.meter.update(self.samples()):
                    self.left_steps = 2
            self.step, self.spent = self.step + 1, spent
            self.shown_step = self.step
            self.left_steps -= self.left_steps > 0
            if self.left_steps == 0 and self.meter.speeds != self.speeds:
                self.start()
                return taken
        return 0


def test_a_slow_rank_gets_fewer_virtual_ranks_within_20_steps() -> None:
    run = Run(0.1, 0.2)
    assert run.takes(20) and [len(share) for share in run.shares] == [8, 4]
    assert not run.takes(200)
    run.seconds = [0.4, 0.2]  # after a restart, twice as many steps must agree
    assert run.takes(60) > WINDOW_STEPS * 2 and [len(share) for share in run.shares] == [4, 8]
    assert not run.takes(int(STEADY_SECONDS))  # more seconds than that
    run.seconds = [0.4, 0.4]
    assert run.takes(20) and [len(share) for share in run.shares] == [6, 6]


def test_a_fast_rank_with_little_memory_gets_no_more_than_fit() -> None:
    run = Run(0.1, 0.1, 0.2)
    run.limits = [4, 12, 12]
    assert run.takes(20) and [len(share) for share in run.shares] == [4, 6, 2]
    run.limits = [12, 12, 12]  # the next start has more memory
    assert run.takes(60) and [len(share) for share in run.shares] == [5, 5, 2]
    assert not run.meter.limited


def test_an_assignment_that_is_faster_only_beyond_the_memory_restarts_nothing() -> None:
    run = Run(0.1, 0.2)
    run.limits = [6, 12]
    assert not run.takes(200) and run.meter.limited == {0: (8, 6)}
    run = Run(0.1, 0.11)
    run.limits = [1, 1]  # of a faulty rank: it has six already
    assert not run.takes(200) and not run.meter.limited
    run.seconds[1] = 0.2
    assert not run.takes(200) and run.meter.limited == {0: (8, 6)}


@pytest.mark.parametrize("seconds", [0.021, 0.05, 0.2, 5.0])
def test_a_permanent_slowdown_is_corrected_after_less_than_20_steps(seconds: float) -> None:
    for healthy_steps in range(50, 54):
        run = Run(seconds, seconds)
        assert not run.takes(healthy_steps)
        run.seconds = [seconds, 2 * seconds]  # a step takes at least a quarter of a second
        assert WINDOW_STEPS < run.takes(100) < 20 and [len(share) for share in run.shares] == [8, 4]


@pytest.mark.parametrize("seconds", [0.005, 0.05, 5.0])
@pytest.mark.parametrize("factor", [2, 5])
def test_a_temporary_slowdown_is_ignored(seconds: float, factor: int) -> None:
    run = Run(seconds, seconds)
    for slow_steps, healthy_steps in itertools.product(range(1, 11), range(20, 23)):
        assert not run.takes(healthy_steps)
        run.seconds = [seconds, factor * seconds]
        assert not run.takes(slow_steps)
        run.seconds = [seconds, seconds]


@pytest.mark.parametrize("ranks", [2, 8])
def test_10000_steps_with_noise_and_pauses_restart_nothing(ranks: int) -> None:
    draw, slow_steps = random.Random(ranks), [0] * ranks

    def noise(rank: int) -> float:
        slow_steps[rank] -= 1
        if slow_steps[rank] < -20 and draw.random() < 0.005:  # a garbage collection, or another program for some steps
            slow_steps[rank] = draw.choice([1, 1, 4, 8])
        return draw.lognormvariate(0, 0.1) * (3 if slow_steps[rank] > 0 else 1)

    run = Run(*[0.05] * ranks, virtual_ranks=16 * ranks)
    run.noise = noise
    assert not run.takes(10_000)


def test_a_slow_drift_is_followed_with_few_restarts() -> None:
    run, draw, restarts = Run(0.05, 0.05), random.Random(0), 0
    run.noise = lambda rank: draw.lognormvariate(0, 0.05)
    for step in range(2000):
        run.seconds[1] = 0.05 * (1 + step / 1000)  # at the end three times the time
        restarts += run.takes(1) > 0
    assert restarts <= 4 and [len(share) for share in run.shares] == [9, 3]


def test_a_small_or_useless_difference_restarts_nothing() -> None:
    assert not Run(0.1, 0.105).takes(200)
    assert not Run(0.1, 0.2, virtual_ranks=2).takes(200)  # each rank has one already
    long_update = Run(0.1, 0.2)
    long_update.update_seconds = 50.0
    assert not long_update.takes(200)
    assert not Run(0.0, 0.2).takes(200)  # the first rank reports no times of its work
    assert not Run(0.1, 0.2, virtual_ranks=0).takes(200)  # a script without a session


def test_another_session_or_a_rollback_is_measured_from_its_first_step() -> None:
    run = Run(0.1, 0.1)
    assert not run.takes(500)
    run.step, run.seconds = 0, [0.1, 0.2]
    assert run.takes(20) and [len(share) for share in run.shares] == [8, 4]


def test_as_many_first_steps_are_skipped_after_a_resume() -> None:
    for step in (0, 100):  # two more are taken until the ranks have voted
        assert Run(0.1, 0.2, resumes_at=step).takes(50) == SKIPPED_STEPS + WINDOW_STEPS + 2


@pytest.mark.parametrize("nodes", [[0, 1, 2], [0, 2], [0]])
def test_added_removed_or_replaced_ranks_start_with_equal_shares(nodes: list[int]) -> None:
    run = Run(0.1, 0.2)
    assert run.takes(20)
    run.start()
    assert run.meter.speeds != ()  # the same ranks: they keep their shares
    run.meter.start(nodes)
    assert run.meter.speeds == ()


def test_samples_have_the_times_of_whole_steps() -> None:
    descriptor = make_status_page(0)
    guard = SimpleNamespace(page=StatusPage(descriptor))
    progress: Any = SimpleNamespace(
        _guard=guard, samples=0, throughput=ThroughputMeter(), use=SimpleNamespace(tokens=0, samples=0)
    )
    progress.is_open = False
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD):
        guard.page.enter(phase)
    TrainingProgress.record_step(progress, StepRecord(1, cast(Any, None), 0.1, ()), 1, tracked=False)
    of_step = read_counters(descriptor).phase_seconds
    assert of_step[Phase.FORWARD] > 0
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD):  # of the next step
        guard.page.enter(phase)
    assert read_counters(descriptor).phase_seconds == of_step
    guard.page.close()
    os.close(descriptor)
