"""Before anybody is accused: does the run really stand still?"""

from typing import Any

import pytest

from paceline.guard.detectors import (
    StallAlarm,
    StallDetector,
    is_run_stalled,
    mark_unknown_as_waiting,
    ranks_to_interrupt,
)
from paceline.protocol.evidence import Diagnosis, DiagnosisKind, Evidence, Frame, Op, Phase, RankSample, Stack
from paceline.protocol.job import HangTimeout

ALARM = StallAlarm("stall", 5.0, 5.0)
FIVE = HangTimeout.parse("5")
WAITS = Op("0", 3, "all_reduce", shape="[8]")
DONE = Op("0", 2, "all_reduce", shape="[8]", done=True)


def rank(number: int, *ops: Op, still_seconds: float = 5.2, **known: Any) -> Evidence:
    return Evidence(number, "n1", 100 + number, still_seconds=still_seconds, ops=ops, answered=True, **known)


@pytest.mark.parametrize(
    ("ranks", "stalled"),
    [
        ([rank(0, DONE, WAITS), rank(1, DONE)], True),
        ([rank(0, DONE), rank(1, DONE)], False),  # a script that computes for an hour between two collectives
        ([rank(0, DONE, WAITS), rank(1, DONE, still_seconds=0.4)], False),  # progress since the alarm
        ([rank(0, DONE, WAITS), rank(1, DONE, still_seconds=0.0, code=0)], True),  # an ended rank does not count
        ([rank(0, phase=Phase.DATA)], True),  # a hanging loader
        ([rank(0, phase=Phase.FORWARD)], False),
    ],
)
def test_a_run_is_stalled_if_a_rank_waits_and_none_has_made_progress(ranks: list[Evidence], stalled: bool) -> None:
    assert is_run_stalled(ranks, ALARM, FIVE) is stalled


def test_a_script_may_compute_for_half_an_hour_while_others_wait_unless_the_user_has_said_how_long() -> None:
    alarm, auto = StallAlarm("stall", 300.0, 300.0), HangTimeout.parse("auto")
    waits = rank(0, DONE, WAITS, still_seconds=301.0)
    busy = rank(1, DONE, still_seconds=301.0, cpu_seconds=0.98)
    assert not is_run_stalled([waits, busy], alarm, auto)
    assert is_run_stalled([waits, busy], StallAlarm("stall", 1800.0, 1800.0), auto) is False  # progress since the alarm
    assert is_run_stalled([waits, rank(1, DONE, still_seconds=301.0)], alarm, auto), "it only sleeps"
    assert is_run_stalled([waits, busy], alarm, FIVE)


def test_a_step_in_which_nobody_waits_stands_still_after_a_minute_or_where_it_computes_after_half_an_hour() -> None:
    auto, long, longer = (
        HangTimeout.parse("auto"),
        StallAlarm("stall", 300.0, 300.0),
        StallAlarm("stall", 1800.0, 300.0),
    )
    sleeps = rank(0, DONE, phase=Phase.FORWARD, still_seconds=1801.0)
    computes = rank(0, DONE, phase=Phase.FORWARD, still_seconds=1801.0, cpu_seconds=0.98)
    script = rank(0, DONE, phase=Phase.FORWARD, still_seconds=1801.0, script=True)
    assert not is_run_stalled([sleeps], ALARM, FIVE)
    assert is_run_stalled([sleeps], StallAlarm("stall", 60.0, 60.0), FIVE)
    assert is_run_stalled([computes], StallAlarm("stall", 60.0, 60.0), FIVE)  # with an explicit limit
    assert is_run_stalled([sleeps], long, auto) and not is_run_stalled([computes], long, auto)
    assert is_run_stalled([computes], longer, auto)
    assert not is_run_stalled([script], longer, auto) and not is_run_stalled([computes, script], longer, auto)


def test_before_the_first_collective_a_busy_rank_has_time_to_import() -> None:
    """Its slow disk or busy machine is no fault; a sleeping one is."""
    meeting = Stack("main", (Frame("torch/distributed/rendezvous.py", 9, "_create_c10d_store"),))
    early = rank(0, stacks=(meeting,), state="S")
    assert is_run_stalled([early, rank(1, state="S")], ALARM, FIVE)
    assert not is_run_stalled([early, rank(1, state="R", cpu_seconds=0.9)], ALARM, FIVE)
    assert not is_run_stalled([early, rank(1, state="D")], ALARM, FIVE)
    verifies = rank(0, WAITS)  # the first of all is in DDP's constructor already
    assert not is_run_stalled([verifies, rank(1, state="R", cpu_seconds=0.9)], ALARM, FIVE)
    assert is_run_stalled(
        [verifies, rank(1, DONE, state="R", cpu_seconds=0.9)], ALARM, FIVE
    )  # it has called a collective
    minute = StallAlarm("stall", 60.0, 60.0)
    late = [early, rank(1, state="R", cpu_seconds=0.9, still_seconds=61.0)]
    assert is_run_stalled([rank(0, stacks=(meeting,), still_seconds=61.0), late[1]], minute, FIVE)


def test_importing_a_part_of_torch_is_no_waiting_wherever_it_lies() -> None:
    """DDP's first use imports torch.distributed.tensor, and the compiler with it, for seconds."""
    files = ("torch/distributed/tensor/_ops/single_dim_strategy.py", "torch/distributed/tensor/__init__.py")
    importing = Stack("main", (Frame(files[0], 526, "_schema_args_match"), Frame(files[1], 4, "<module>")))
    waiting = Stack("main", (Frame("torch/distributed/c10d.py", 9, "all_reduce"), Frame("train.py", 3, "<module>")))
    assert not is_run_stalled([rank(n, stacks=(importing,), state="R", cpu_seconds=0.4) for n in (0, 1)], ALARM, FIVE)
    assert is_run_stalled([rank(0, stacks=(waiting,)), rank(1, state="S")], ALARM, FIVE)


def sample(phase: Phase, *, met: bool) -> RankSample:
    return RankSample(0, "n1", 100, phase=phase, phase_seconds=(0.0,) * len(Phase), still_seconds=3.0, met=met)


def test_scripts_may_wait_where_nothing_shows_it_but_a_script_alone_for_whom() -> None:
    ranks = [sample(Phase.USER, met=True), sample(Phase.INIT, met=False), sample(Phase.EVALUATE, met=True)]
    assert [one.waiting for one in mark_unknown_as_waiting(ranks, 3)] == [True, True, False]
    assert not any(one.waiting for one in mark_unknown_as_waiting(ranks[:1], 1))


def test_a_script_begins_until_its_first_collective() -> None:
    """Importing torch may take as long as it likes to: windows of the user's are for steps."""
    met, not_met = sample(Phase.USER, met=True), sample(Phase.USER, met=False)
    assert {one.phase for one in mark_unknown_as_waiting([not_met, not_met], 2)} == {Phase.INIT}
    assert {one.phase for one in mark_unknown_as_waiting([met, not_met], 2)} == {Phase.USER}


def test_only_the_innocent_are_freed_unless_the_guilty_wait_too() -> None:
    ranks = [rank(0, WAITS), rank(1), rank(2, WAITS), rank(3, code=-9)]
    assert ranks_to_interrupt(Diagnosis(DiagnosisKind.BEHIND, causes=(1,)), ranks) == (0, 2)
    assert ranks_to_interrupt(Diagnosis(DiagnosisKind.MISMATCH, causes=(1,)), ranks) == (0, 1, 2)
    assert ranks_to_interrupt(Diagnosis(DiagnosisKind.NETWORK), ranks) == (0, 1, 2)


def test_a_script_that_is_seen_from_outside_is_judged_as_one_that_says_nothing() -> None:
    """It may compute its batches for long while others wait, and its ranks may wait where no box shows it."""
    alarm, auto = StallAlarm("stall", 300.0, 300.0), HangTimeout.parse("auto")
    waits = rank(0, DONE, WAITS, still_seconds=301.0, script=True, phase=Phase.BACKWARD)
    loads = rank(1, DONE, still_seconds=301.0, script=True, phase=Phase.DATA, cpu_seconds=0.98)
    assert not is_run_stalled([waits, loads], alarm, auto)
    pace = StallDetector(auto)
    for now_seconds, step, still_seconds in ((996.0, 1, 0.0), (1000.0, 50, 200.0)):
        samples = [
            RankSample(n, "n1", 7, step=step, met=True, script=True, phase=Phase.FORWARD, still_seconds=still_seconds)
            for n in (0, 1)
        ]
        found = pace.update(now_seconds, mark_unknown_as_waiting(samples, 2))
    assert found is not None and (found.kind, found.window_seconds) == ("warn", 300.0)
