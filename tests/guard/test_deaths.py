"""Which rank failed first, and when that is judged: one row of FAULTS.md's table a.1 after the other, and its laws."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.guard.deaths import (
    DIAGNOSIS_DELAY_SECONDS,
    MAX_CLEANUP_SECONDS,
    VICTIM_DIAGNOSIS_DELAY_SECONDS,
    RankEndKind,
    classify_rank_end,
    diagnosis_due_at_seconds,
    first_to_fail,
)
from paceline.guard.judge import diagnose, diagnose_first_failure
from paceline.protocol.evidence import Evidence, Failure, RankSample

GLOO = "[rank0]: RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5120\n"


def record(rank: int, at: float, *, victim: bool = False, code: int = 1) -> Failure:
    return Failure(rank, "host", 100 + rank, code, "ValueError", "bad sample", "", victim, at)


def ended(
    rank: int, code: int | None, at: float = 10.0, *, failure: Failure | None = None, log: str = ""
) -> RankSample:
    return RankSample(rank, "host", 100 + rank, code=code, ended_seconds=at, failure=failure, error_text=log)


def victim(rank: int, at: float) -> RankSample:
    return ended(rank, 1, at, failure=record(rank, at, victim=True))


ROWS = {
    "SIGKILL, victims seen first": [victim(0, 1.0), ended(1, -signal.SIGKILL, 1.2), victim(2, 1.1)],
    "SIGSEGV": [ended(0, -signal.SIGABRT, 1.0, log=GLOO), ended(1, -signal.SIGSEGV, 1.1), victim(2, 1.2)],
    "raises": [victim(0, 1.1), ended(1, 1, 1.3, failure=record(1, 1.0)), victim(2, 1.2)],
    "raises, then 3 s of clean-up": [victim(0, 1.1), ended(1, None, failure=record(1, 1.0)), victim(2, 1.2)],
    "raises, and its teardown aborts": [ended(1, -signal.SIGABRT, 2.0, failure=record(1, 1.0)), victim(0, 1.1)],
    "raises an unknown error of the loss of rank 1": [
        ended(0, 1, 1.5, failure=record(0, 1.2)),
        ended(1, 1, 4.0, failure=record(1, 1.0)),
    ],
    "sys.exit(3)": [ended(0, 1, 1.0, log=GLOO), ended(1, 3, 1.2), victim(2, 1.1)],
    "a victim without record dies of SIGSEGV": [ended(0, -signal.SIGSEGV, 1.0, log=GLOO), ended(1, 3, 1.1)],
    "SIGKILL after its log spoke of peers": [victim(0, 1.0), ended(1, -signal.SIGKILL, 1.1, log=GLOO)],
}


@pytest.mark.parametrize("name", ROWS)
def test_guilty_rank_is_named(name: str) -> None:
    primary = first_to_fail(ROWS[name])
    assert primary is not None and primary.rank == 1


def test_early_end_leaves_the_first_victim() -> None:
    primary = first_to_fail([victim(2, 1.2), ended(1, 0, 1.0), victim(0, 1.1)])
    assert primary is not None and primary.rank == 0 and classify_rank_end(primary) is RankEndKind.VICTIM


def test_nobody_failed() -> None:
    running = [ended(0, 0), ended(1, None)]
    assert first_to_fail(running) is None and diagnosis_due_at_seconds(running) is None


def test_exit_codes() -> None:
    crashed = ended(0, -6, failure=record(0, 1.0, code=2))  # the record counts, not the crash of the teardown
    assert (ended(0, -9).shell_exit_code, ended(0, 3).shell_exit_code, crashed.shell_exit_code) == (137, 3, 2)


def test_when_a_diagnosis_is_due() -> None:
    running = ended(2, None)
    assert diagnosis_due_at_seconds([victim(0, 10.0), running]) == 10.0 + VICTIM_DIAGNOSIS_DELAY_SECONDS
    culprit = ended(1, None, failure=record(1, 9.0))
    assert diagnosis_due_at_seconds([victim(0, 10.0), culprit, running]) == 10.0 + DIAGNOSIS_DELAY_SECONDS
    assert diagnosis_due_at_seconds([ended(1, 3, 12.0), victim(0, 10.0), running]) == 12.0 + DIAGNOSIS_DELAY_SECONDS
    assert diagnosis_due_at_seconds([victim(0, 10.0), ended(1, 0, 1.0)]) == 10.0  # no rank runs
    cleans_up = ended(0, None, failure=record(0, 5.0))
    assert diagnosis_due_at_seconds([cleans_up, running]) == 5.0 + MAX_CLEANUP_SECONDS


times = st.floats(0, 100)


@st.composite
def worlds(draw: st.DrawFn) -> list[RankSample]:
    def one(rank: int) -> RankSample:
        code = draw(st.sampled_from([None, 0, 1, 3, -6, -9, -11]))
        failure = draw(st.none() | st.builds(record, st.just(rank), times, victim=st.booleans()))
        if code == 0:
            failure = None
        return ended(rank, code, draw(times), failure=failure, log=draw(st.sampled_from(["", GLOO, "step 3\n"])))

    return [one(rank) for rank in range(draw(st.integers(1, 5)))]


@given(worlds(), st.randoms(use_true_random=False))
def test_the_choice_is_the_best_kind_then_the_oldest_in_any_order(world: list[RankSample], random) -> None:
    primary = first_to_fail(world)
    failed = [one for one in world if one.ended_badly or (one.is_running and one.failure)]
    assert (primary is None) == (not failed)
    if primary is None:
        return
    assert primary in failed
    for other in failed:
        assert (classify_rank_end(primary), primary.failed_at_seconds) <= (
            classify_rank_end(other),
            other.failed_at_seconds,
        )
    random.shuffle(world)
    assert first_to_fail(world) == primary


@given(worlds())
def test_more_victims_never_take_the_blame(world: list[RankSample]) -> None:
    primary = first_to_fail(world)
    crowd = [*world, *(victim(rank, -1.0) for rank in (90, 91))]
    if primary is not None and classify_rank_end(primary) is not RankEndKind.VICTIM:
        assert first_to_fail(crowd) == primary


@given(worlds())
def test_a_failure_is_always_told_some_time(world: list[RankSample]) -> None:
    due = diagnosis_due_at_seconds(world)
    assert (due is None) == (first_to_fail(world) is None)
    if due is not None:
        assert due <= 100 + MAX_CLEANUP_SECONDS


@given(worlds())
def test_the_judge_of_hangs_names_the_same_rank_where_samples_are_all_it_has(world: list[RankSample]) -> None:
    diagnosis, first = diagnose([Evidence.from_sample(one) for one in world]), first_to_fail(world)
    assert diagnosis.failed == diagnose_first_failure(world).failed == (None if first is None else first.rank)
    if first is not None and classify_rank_end(first).is_primary:
        assert diagnosis.causes[:1] == (first.rank,)


def test_a_victim_is_not_the_news_where_a_living_rank_is_to_blame() -> None:
    lost = Evidence(0, "host", 100, code=1, failure=record(0, 10.0, victim=True))
    frozen = Evidence(1, "host", 101, state="T", ops=())
    diagnosis = diagnose([lost, frozen])
    assert (diagnosis.failed, diagnosis.causes) == (None, (1,))
    assert diagnose([lost, Evidence(1, "host", 101)]).failed == 0, "nobody was asked"


def test_what_travels_is_ages() -> None:
    sample = ended(1, 1, 70.0, failure=record(1, 60.0))
    sent = sample.swap_times_and_ages(100.0)
    assert (sent.ended_seconds, sent.failed_at_seconds) == (30.0, 40.0)
    assert sent.swap_times_and_ages(1000.0).ended_seconds == 970.0  # by the receiver's clock
    assert ended(1, None).swap_times_and_ages(100.0).ended_seconds == 0.0
