"""--balance: the numbers of virtual ranks follow the speeds, and only a lasting difference restarts the ranks."""

import itertools
import random
from collections.abc import Sequence

import pytest
from tests.errors import raises

from paceline.protocol.balance import (
    WINDOW_STEPS,
    WINDOWS,
    SpeedMeter,
    assign_virtual_ranks,
    parse_balance,
    speeds_of_ranks,
)
from paceline.protocol.evidence import Phase, WorkerSample


def counts(virtual_ranks: int, speeds: Sequence[float]) -> list[int]:
    return [len(share) for share in assign_virtual_ranks(virtual_ranks, len(speeds), speeds)]


def test_no_other_assignment_makes_the_slowest_rank_faster() -> None:
    draw = random.Random(0)
    for _ in range(200):
        speeds = [draw.uniform(0.2, 3) for _ in range(draw.randint(1, 4))]
        virtual_ranks = draw.randint(len(speeds), 9)
        shares = assign_virtual_ranks(virtual_ranks, len(speeds), speeds)
        assert [v for share in shares for v in share] == [*range(virtual_ranks)] and all(shares)

        def seconds(numbers: Sequence[int], speeds: Sequence[float] = speeds) -> float:
            return max(number / speed for number, speed in zip(numbers, speeds, strict=True))

        others = itertools.product(range(1, virtual_ranks + 1), repeat=len(speeds))
        best = min(seconds(numbers) for numbers in others if sum(numbers) == virtual_ranks)
        assert seconds([len(share) for share in shares]) == best


def test_speeds_are_of_ranks_or_of_nodes() -> None:
    assert parse_balance("auto") == parse_balance(None) == ()
    assert speeds_of_ranks(parse_balance("3:1.5"), [1, 1]) == (3, 1.5)
    assert speeds_of_ranks((3, 1), [2, 2]) == (3, 3, 1, 1)
    with raises("balance-count", ranks=4, nodes=2):
        speeds_of_ranks((3, 1, 1), [2, 2])


@pytest.mark.parametrize("text", ["", "3", "3:", "3:0", "-1:2", "a:b", "1e9:1", "nan:1"])
def test_a_wrong_ratio_is_an_error(text: str) -> None:
    with raises("balance-invalid", value=text):
        parse_balance(text)


class Run:
    """Ranks that need `seconds[rank]` for a virtual rank, and report as real ones do."""

    def __init__(self, *seconds: float, virtual_ranks: int = 12) -> None:
        self.seconds, self.virtual_ranks, self.meter, self.step = [*seconds], virtual_ranks, SpeedMeter(), 0
        self.update_seconds = 0.0
        self.start()

    def start(self) -> None:
        self.meter.start([*range(len(self.seconds))])
        self.shares = assign_virtual_ranks(max(self.virtual_ranks, 2), len(self.seconds), self.meter.speeds)
        self.spent = [[0.0] * len(Phase) for _ in self.seconds]

    def takes(self, steps: int) -> bool:
        """Whether the meter finds another assignment while the run takes these steps. Then the ranks restart."""
        for _ in range(steps):
            self.step += 1
            times = [len(share) * seconds for share, seconds in zip(self.shares, self.seconds, strict=True)]
            for spent, time in zip(self.spent, times, strict=True):
                spent[Phase.FORWARD] += time / 3
                spent[Phase.BACKWARD] += time / 3 + max(times) - time  # as under zero, where it waits for others
                spent[Phase.OPTIMIZER] += self.update_seconds
            if self.meter.update([
                WorkerSample(rank, "n", 1, step=self.step, phase_seconds=tuple(spent), virtual_ranks=self.virtual_ranks)
                for rank, spent in enumerate(self.spent)
            ]):  # fmt: skip
                self.start()
                return True
        return False


def test_a_slow_rank_gets_fewer_virtual_ranks_within_20_steps() -> None:
    run = Run(0.1, 0.2)
    assert run.takes(20) and [len(share) for share in run.shares] == [8, 4]
    assert not run.takes(200)
    run.seconds = [0.2, 0.1]  # after a restart, twice as many measurements must agree
    assert not run.takes(24) and run.takes(24) and [len(share) for share in run.shares] == [4, 8]


def test_a_permanent_slowdown_counts_within_20_steps_and_a_temporary_one_does_not() -> None:
    run = Run(0.1, 0.1)
    assert not run.takes(50)
    run.seconds = [0.1, 0.3]
    assert not run.takes((WINDOWS - 2) * WINDOW_STEPS)
    run.seconds = [0.1, 0.1]
    assert not run.takes(200)
    run.seconds = [0.1, 0.3]
    assert run.takes(20) and [len(share) for share in run.shares] == [9, 3]


def test_a_small_or_useless_difference_restarts_nothing() -> None:
    assert not Run(0.1, 0.105).takes(200)
    assert not Run(0.1, 0.2, virtual_ranks=2).takes(200)  # each rank has one already
    long_update = Run(0.1, 0.2)
    long_update.update_seconds = 5.0
    assert not long_update.takes(200)
    assert not Run(0.0, 0.2).takes(200)  # the first rank reports no times of its work
    assert not Run(0.1, 0.2, virtual_ranks=0).takes(200)  # a script without a session


def test_another_session_or_a_rollback_is_measured_from_its_first_step() -> None:
    run = Run(0.1, 0.1)
    assert not run.takes(500)
    run.step, run.seconds = 0, [0.1, 0.2]
    assert run.takes(20) and [len(share) for share in run.shares] == [8, 4]


@pytest.mark.parametrize("nodes", [[0, 1, 2], [0, 2], [0]])
def test_added_removed_or_replaced_ranks_start_with_equal_shares(nodes: list[int]) -> None:
    run = Run(0.1, 0.2)
    assert run.takes(20)
    run.start()
    assert run.meter.speeds != ()  # the same ranks: they keep their shares
    run.meter.start(nodes)
    assert run.meter.speeds == ()
