"""Which waits can never end, and when to look for them."""

from typing import Any

import pytest
from msgspec.structs import replace
from tests.guard.judge_world import STRUCTURAL, make_case

from paceline.guard.detectors import MAX_DEADLOCK_SECONDS, DeadlockCheckSchedule
from paceline.guard.judge import DEADLOCK_SECONDS, is_deadlocked
from paceline.protocol.evidence import Evidence, Frame, Op, RankSample, Stack
from paceline.protocol.job import HangTimeout

WAITS = Frame("torch/distributed/distributed_c10d.py", 3000, "all_reduce")
CASES = 2000


def op(group: str = "0", seq: int = 9, kind: str = "all_reduce", *, line: int = 97, **changes: Any) -> Op:
    usual = {"shape": "[8]", "dtype": "float32", "site": f"train.py:{line} in step"}
    return Op(group, seq, kind, **(usual | changes))


def rank(number: int, *ops: Op, inside: bool = True, **changes: Any) -> Evidence:
    line = int(ops[-1].site.partition(":")[2].split()[0]) if ops else 1
    frames = (*([WAITS] if inside else []), Frame("train.py", line, "step"))
    known: dict[str, Any] = {"answered": True, "state": "S", "still_seconds": 5.0, "stacks": (Stack("main", frames),)}
    groups = {"0": (), "1": (0, 1), "2": (1, 2), "shared": ()}
    return Evidence(number, "n1", 100 + number, ops=ops, groups=groups, **(known | changes))


ANOTHER = rank(1, op(kind="barrier", shape="", dtype="", line=5))


@pytest.mark.parametrize(
    "second",
    [
        ANOTHER,
        rank(1, op(shape="[9]")),
        rank(1, op(dtype="float64")),
        rank(1, op("shared", 4, "all_gather")),
        rank(1, op("1", 4)),
    ],
    ids=["another kind", "another shape", "another type", "a circle of two groups", "a circle with a subgroup"],
)
def test_waits_that_never_end_are_found_whatever_a_third_rank_does(second: Evidence) -> None:
    first = rank(0, op())
    assert is_deadlocked([first, second])
    assert is_deadlocked([first, second, rank(2, inside=False, still_seconds=0.0)])


def test_in_shared_memory_names_are_compared_and_over_a_transport_they_are_not() -> None:
    named = [[rank(n, op(group, name=f"sum {n}")) for n in (0, 1)] for group in ("0", "shared")]
    assert [is_deadlocked(ranks) for ranks in named] == [False, True]


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(0, op()), rank(1, op())],
        [rank(0, op()), rank(1, inside=False)],
        [rank(0, op()), rank(1, op(kind="barrier", line=5), still_seconds=DEADLOCK_SECONDS / 2)],
        [rank(0, op()), rank(1, op(kind="barrier", line=5), answered=False)],
        [rank(0, op()), rank(1, op(kind="barrier", line=5), inside=False)],
        [rank(0, op()), rank(1, op(kind="barrier", line=5), cpu_seconds=0.9)],
        [rank(0, op()), rank(1, op(kind="barrier", line=5), code=0)],
        [rank(0, op(kind="all_gather", shape="[3]")), rank(1, op(kind="all_gather", shape="[4]"))],
        [rank(0, op("1", 3)), rank(1, op("2", 7, line=5)), rank(2, inside=False)],
        [rank(0, op(kind="recv", peer=1)), rank(1, op(kind="recv", peer=0))],
        [rank(0, op("1", 5, done=False), op(line=5)), rank(1, op(line=5), inside=False)],
    ],
    ids=[
        "the same collective", "one is late", "one has just come", "one does not answer", "one is in its own code",
        "one computes", "one has ended", "sizes that may differ", "other groups, for a third rank", "messages",
        "one has started another collective and does not wait for it",
    ],
)  # fmt: skip
def test_waits_that_may_end_are_left_to_the_window(ranks: list[Evidence]) -> None:
    assert not is_deadlocked(ranks)


def test_over_random_programs_no_rank_that_only_hangs_or_ends_is_taken_for_a_mismatch() -> None:
    found = dict.fromkeys(["structural", "sudden"], 0)
    for seed in range(CASES):
        case = make_case(seed)
        if not case.finished:
            certain = is_deadlocked([replace(one, still_seconds=60.0) for one in case.evidence])
            found["structural" if case.mutation in STRUCTURAL else "sudden"] += certain
    assert found["sudden"] == 0
    assert found["structural"] > 50


def waiting(now_seconds: float, **since_seconds: float) -> list[RankSample]:
    ages = {int(name[1:]): now_seconds - since for name, since in since_seconds.items()}
    return [RankSample(n, "n1", 100 + n, waiting=True, still_seconds=age) for n, age in ages.items()]


def test_ranks_are_asked_once_when_two_have_waited_and_again_when_another_has_come() -> None:
    unmet = DeadlockCheckSchedule(HangTimeout())
    assert not unmet.should_collect(11.0, waiting(11.0, r0=0.0)), "one alone"
    assert not unmet.should_collect(11.0, waiting(11.0, r0=0.0, r1=10.0))  # the second has just begun to wait
    assert unmet.should_collect(12.5, waiting(12.5, r0=0.0, r1=10.0))
    assert not any(unmet.should_collect(now, waiting(now, r0=0.0, r1=10.0)) for now in map(float, range(13, 60)))
    assert not unmet.should_collect(63.0, waiting(63.0, r0=0.0, r1=10.0, r2=60.0))  # the required time has doubled
    assert unmet.should_collect(65.0, waiting(65.0, r0=0.0, r1=10.0, r2=60.0))


def test_however_often_waiting_was_nothing_a_new_wait_is_looked_at_after_some_seconds() -> None:
    unmet, asked = DeadlockCheckSchedule(HangTimeout()), 0
    for start in range(0, 1000, 20):
        waits = waiting(start + MAX_DEADLOCK_SECONDS + 0.5, r0=float(start), r1=float(start))
        asked += unmet.should_collect(start + MAX_DEADLOCK_SECONDS + 0.5, waits)
    assert asked == 50


def test_without_the_guard_nobody_is_asked() -> None:
    assert not DeadlockCheckSchedule(HangTimeout.parse("off")).should_collect(60.0, waiting(60.0, r0=0.0, r1=0.0))
