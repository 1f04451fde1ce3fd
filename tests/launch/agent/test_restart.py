"""The policy alone: which failure is worth another start, with how many ranks, and when it is enough."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.guard.deaths import RankEndKind
from paceline.launch.agent.coordinator import FailedGeneration, decide_restart
from paceline.protocol.evidence import Diagnosis, DiagnosisKind, Evidence, Op, RankSample

KILLED = FailedGeneration(RankEndKind.SIGNAL, rank=1, exit_code=137, exception="", step=40, nproc=4)
RAISED = FailedGeneration(RankEndKind.EXCEPTION, rank=1, exit_code=1, exception="ValueError", step=40, nproc=4)
ENDED = FailedGeneration(RankEndKind.EXIT, rank=1, exit_code=3, exception="", step=40, nproc=4)
APART = FailedGeneration.from_diagnosis(Diagnosis(DiagnosisKind.MISMATCH, (1,)), [], 4, step=40, nproc=4)
LOST = FailedGeneration(RankEndKind.VICTIM, rank=0, exit_code=1, exception="DistNetworkError", step=40, nproc=4)


def stalled(seq: int, causes: tuple[int, ...] = (1,)) -> FailedGeneration:
    """In a script, whose steps nobody counts."""
    diagnosis = Diagnosis(DiagnosisKind.BEHIND, causes, op=Op("0", seq, "all_reduce"))
    return FailedGeneration.from_diagnosis(diagnosis, [], 3, step=0, nproc=4)


def later(failed: FailedGeneration, steps: int = 1) -> FailedGeneration:
    return replace(failed, step=failed.step + steps)


def of(failed: FailedGeneration, nproc: int) -> FailedGeneration:
    return replace(failed, nproc=nproc)


# name -> (history, min_nproc, max_restarts, ranks of the restart or a part of the sentence)
ROWS = {
    "nobody asked for restarts": ([KILLED], 0, 0, ""),
    "killed": ([KILLED], 0, 1, 4),
    "a network that broke": ([LOST], 0, 1, 4),
    "an exception": ([RAISED], 0, 3, "ValueError is an error of the program"),
    "an exception for a killed loader worker": ([replace(RAISED, loader_killed=True)], 0, 3, 4),
    "an exit code": ([ENDED], 0, 3, "ended with exit code 3"),
    "wrong use": ([replace(LOST, exit_code=2)], 0, 3, "wrong use"),
    "lost a rank that ended early": ([replace(LOST, good_exit_codes=frozenset({0}))], 0, 3, "ended while others ran"),
    "killed while another was done": ([replace(KILLED, good_exit_codes=frozenset({0}))], 0, 3, 4),
    "killed after another had saved": ([replace(KILLED, good_exit_codes=frozenset({75}))], 0, 3, "had saved its state"),
    "an exception after a restart": ([KILLED, RAISED], 0, 3, "ValueError"),
    "progress": ([KILLED, later(KILLED)], 0, 3, 4),
    "a script's progress": ([stalled(5), stalled(10)], 0, 3, 4),
    "a script that stalls at the same place": ([stalled(5), stalled(5)], 0, 3, "twice: rank 1, exit code 3"),
    "nobody to blame, twice": ([stalled(5, ()), stalled(5, ())], 0, 3, "at the same step twice: exit code 3"),
    "ranks that call different collectives": ([APART], 0, 3, "different collectives"),
    "used up": ([KILLED, later(KILLED)], 0, 1, "1 of 1 restarts are used up"),
    "the same step twice": ([KILLED, KILLED], 0, 3, "the same failure at the same step twice: rank 1, exit code 137"),
    "not even so far": ([KILLED, later(KILLED, -9)], 0, 3, "after step 31"),
    "another rank": ([KILLED, replace(KILLED, rank=2)], 0, 3, 4),
    "another signal": ([KILLED, replace(KILLED, exit_code=139)], 0, 3, 4),
    "another kind": ([KILLED, replace(KILLED, rank_end=RankEndKind.VICTIM)], 0, 3, 4),
    "twice, but not in a row": ([KILLED, LOST, KILLED], 0, 3, 4),
    "one rank fewer": ([KILLED, KILLED], 3, 3, 3),
    "fewer counts as a restart": ([KILLED, KILLED], 3, 1, "used up"),
    "fewer is a new count": ([KILLED, KILLED, of(KILLED, 3)], 3, 3, 3),
    "never fewer than min_nproc": ([KILLED, KILLED, of(KILLED, 3), of(KILLED, 3)], 3, 9, "the same step twice"),
    "fewer and fewer": ([KILLED, KILLED, of(KILLED, 3), of(KILLED, 3)], 1, 9, 2),
    "never without ranks": ([of(KILLED, 1), of(KILLED, 1)], 1, 9, "the same step twice"),
}


@pytest.mark.parametrize("name", ROWS)
def test_decision(name: str) -> None:
    history, min_nproc, max_restarts, expected = ROWS[name]
    decision = decide_restart(history, nproc=history[0].nproc, min_nproc=min_nproc, max_restarts=max_restarts)
    if isinstance(expected, int):
        assert decision == expected
    else:
        assert isinstance(decision, str) and expected in decision
        assert bool(decision) == (max_restarts > 0)


def test_a_rank_killed_during_a_restart_with_other_shares_or_nodes_is_replaced() -> None:
    saved, killed = RankSample(0, "n", 1, code=75), RankSample(1, "n", 2, code=-9)
    diagnosis, ranks = (
        Diagnosis(DiagnosisKind.DIED, (1,), failed=1),
        [Evidence.from_sample(one) for one in (saved, killed)],
    )
    for regroups, expected in ((True, 2), (False, "a stop was requested")):
        failed = FailedGeneration.from_diagnosis(diagnosis, ranks, 137, step=40, nproc=2, regroups=regroups)
        decision = decide_restart([failed], nproc=2, min_nproc=0, max_restarts=1)
        assert decision == expected or str(expected) in str(decision)


failures = st.builds(
    FailedGeneration,
    rank_end=st.sampled_from([RankEndKind.SIGNAL, RankEndKind.SIGNAL, RankEndKind.SIGNAL, RankEndKind.VICTIM]),
    rank=st.integers(0, 1),
    exit_code=st.sampled_from([137, 139]),
    exception=st.just(""),
    step=st.integers(0, 2),
    nproc=st.just(0),
)


@given(st.lists(failures, min_size=30, max_size=30), st.integers(1, 5), st.integers(0, 6), st.integers(0, 8))
def test_never_more_restarts_and_never_fewer_ranks_than_asked(
    coming: list[FailedGeneration], nproc: int, min_nproc: int, max_restarts: int
) -> None:
    history: list[FailedGeneration] = []
    ranks, restarts = nproc, 0
    for failed in coming:
        history.append(of(failed, ranks))
        decision = decide_restart(history, nproc=nproc, min_nproc=min_nproc, max_restarts=max_restarts)
        if isinstance(decision, str):
            break
        restarts += 1
        assert decision in (ranks, ranks - 1)
        ranks = decision
    else:
        pytest.fail("it never stops")
    assert restarts <= max_restarts
    assert 1 <= ranks <= nproc and (ranks == nproc or ranks >= min_nproc > 0)
