"""Finds when a run stands still: from how long each rank has not moved to a warning, and then an alarm.

Nobody in the world has moved for a *window*, and at least one rank waits for something: that is a stall. So is a step
in which nobody waits (a run of one rank, a kernel without end), but after the window of first steps, and under auto,
where somebody computes, after 1800 s. How long the window is depends on what the ranks do, and on the run itself:

    phase                                     --stall-after auto                              --stall-after S
    steps (forward ... optimizer)             5 x the longest gap so far, 10 s to 300 s       S
    data                                      the same, 30 s to 300 s                         S
    init, first steps, evaluate, checkpoint   5 x the longest gap so far, 300 s to 1800 s     4 x S, at least 60 s
    scripts, which say nothing of themselves  5 x the longest gap so far, 300 s to 1800 s     S

A gap is a time in which nobody moved and after which somebody did: what has once gone well is no stall the next time.
If the ranks are in several phases, the one with the largest window counts. Data has a higher floor than the other parts
of a step, for nothing of it repeats exactly: a new epoch starts new loader processes, a file server has its moments.
First steps are those that compile and warm up: one where the user has given a number, else five.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from paceline.contract.boxes import read_counters
from paceline.contract.evidence import Evidence, Phase, Sample, Verdict, VerdictKind
from paceline.contract.marks import read_findings, read_marks, read_orders
from paceline.contract.places import Activity, activity_of, imports_torch
from paceline.contract.windows import JUMP_SECONDS, LEARNED, OF_STEPS, WARM_UP_STEPS, Stage, Windows
from paceline.host.procfs import queued_seconds

CLOCKS_SECONDS = 1.5  # what two looks at a rank may differ by where it has not moved
BUSY_CPU_SECONDS = 0.5  # in a second
IDLE_CPU_SECONDS = 0.05  # in a second; a rank that imports or compiles uses more
OF_A_STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
GUILTY_WAIT_TOO = (VerdictKind.MISMATCH, VerdictKind.DEADLOCK, VerdictKind.NETWORK, VerdictKind.UNKNOWN)

SAMPLE_SECONDS, SHORT_SAMPLE_SECONDS = 1.0, 0.25
SHORT_WINDOW_SECONDS = 10.0
MOVING_SECONDS = 1.0
QUIET_SECONDS, SECONDS_A_NODE = 3.0, 0.003  # who has moved within the first need not be looked at as often, of many


@dataclass(frozen=True)
class Alarm:
    """Nobody has moved for half of the window (warn), or for all of it (stall)."""

    kind: Literal["warn", "stall"]
    still_seconds: float
    window_seconds: float


class Pace:
    """A run's own pace, learned while it runs. One generation's: a restarted run has another."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self.notice = ""  # for the user, once; emptied when it has been said
        self._largest_gap_seconds = dict.fromkeys(Stage, 0.0)
        self._seen_seconds: float | None = None
        self._began_seconds = -math.inf  # ages reach back to this moment only
        self._moved_seconds: float | None = None  # when somebody moved last
        self._stage = Stage.LONG
        self._first_step: int | None = None
        self._warned = False  # of this standstill
        self._next_stall_seconds = 0.0
        self._noticed = False

    def see(self, now_seconds: float, ranks: Sequence[Sample]) -> Alarm | None:
        """Look at all ranks that run; at least once a second, `now_seconds` on one monotonic clock.

        A warning comes once in a standstill, an alarm again after each further window; mostly None.
        """
        if self._seen_seconds is not None and now_seconds - self._seen_seconds > JUMP_SECONDS:
            self._began_seconds, self._moved_seconds = now_seconds, None
        before_seconds, self._seen_seconds = self._seen_seconds, now_seconds
        if not ranks:
            self._moved_seconds = None
            return None
        moved_seconds = max(self._began_seconds, now_seconds - min(rank.still_seconds for rank in ranks))
        if self._moved_seconds is None or moved_seconds > self._moved_seconds + 1e-3:  # ages are sums of floats
            self._learn(moved_seconds, math.inf if before_seconds is None else before_seconds)
        still_seconds = now_seconds - moved_seconds
        steps = self.windows.seconds is None and self._stage in (Stage.STEP, Stage.DATA)
        if not steps or still_seconds >= MOVING_SECONDS:  # else no window is as short
            self._stage = max(self._stage_of(rank) for rank in ranks)
        window_seconds = self.windows.of(self._stage, self._largest_gap_seconds[self._stage])
        if not any(rank.waiting or rank.phase in (Phase.DATA, Phase.SYNC) for rank in ranks):
            if self._stage is not Stage.STEP:
                return None
            window_seconds = self.windows.of(Stage.LONG, self._largest_gap_seconds[self._stage])
        return self._alarm(still_seconds, window_seconds)

    def _learn(self, moved_seconds: float, before_seconds: float) -> None:
        if self._moved_seconds is not None:  # who looks seldom, at many nodes, does not see all that moves in between
            seen_seconds = before_seconds + sample_seconds(self.windows)
            self._take(min(moved_seconds, seen_seconds) - self._moved_seconds)
        self._moved_seconds = moved_seconds
        self._warned, self._next_stall_seconds = False, 0.0

    def _take(self, gap_seconds: float) -> None:
        for stage in OF_STEPS if self._stage in OF_STEPS else (self._stage,):
            self._largest_gap_seconds[stage] = max(self._largest_gap_seconds[stage], gap_seconds)
        asked = self.windows.seconds
        if asked is not None and gap_seconds > asked and self._stage is not Stage.LONG and not self._noticed:
            self._noticed = True
            self.notice = (
                f"nothing moved for {gap_seconds:.1f} s, and then it went on: --stall-after {asked:g} is shorter than "
                f"a healthy step of this run. Choose more than {math.ceil(gap_seconds)}, or auto"
            )

    def _alarm(self, still_seconds: float, window_seconds: float) -> Alarm | None:
        if still_seconds >= max(window_seconds, self._next_stall_seconds):
            self._warned = True  # too late for it
            self._next_stall_seconds = still_seconds + window_seconds
            return Alarm("stall", still_seconds, window_seconds)
        # what has gone well before is not worth a line each time
        if still_seconds >= max(window_seconds / 2, self._largest_gap_seconds[self._stage]) and not self._warned:
            self._warned = True
            return Alarm("warn", still_seconds, window_seconds)
        return None

    def _stage_of(self, rank: Sample) -> Stage:
        if rank.phase is Phase.USER or (rank.script and rank.phase is not Phase.INIT):
            return Stage.USER
        if rank.phase is Phase.INIT or rank.stepped is False or self._first_step is None:
            self._first_step = rank.step  # not before it is known: a resumed run begins anywhere
        if rank.phase in (Phase.INIT, Phase.EVALUATE, Phase.CHECKPOINT, Phase.CLOSE) or rank.stepped is False:
            return Stage.LONG
        if self.windows.seconds is None and rank.step < self._first_step + WARM_UP_STEPS:
            return Stage.WARM_UP
        if rank.stepped is None and rank.step == self._first_step:
            return Stage.LONG
        return Stage.DATA if rank.phase is Phase.DATA else Stage.STEP


def perhaps_waiting(samples: Sequence[Sample], world_size: int) -> list[Sample]:
    """The same, but scripts, and ranks that have not met yet, may wait where no box shows it: they are said to.

    A script of which no rank has called any collective still begins, whatever it is that it does.
    """
    met = any(one.met for one in samples)
    return [
        replace(one, waiting=True, phase=one.phase if met else Phase.INIT)
        if world_size > 1 and (one.script or one.phase in (Phase.USER, Phase.INIT))
        else one
        for one in samples
    ]


def stands_still(evidence: Sequence[Evidence], alarm: Alarm, windows: Windows) -> bool:
    """Whether nobody has moved since the alarm, and somebody waits: a script may also be busy for long by itself."""
    running = [one for one in evidence if one.runs]
    if any(one.reads_input for one in running):  # a person thinks, or what is piped into the run has a pause
        return False
    if not running or min(one.still_seconds for one in running) < alarm.still_seconds - CLOCKS_SECONDS:
        return False
    if not any(waits(one) for one in running):
        busy = any(one.cpu_seconds > BUSY_CPU_SECONDS for one in running)
        cap_seconds = LEARNED[Stage.LONG][1] if windows.seconds is None and busy else 0.0
        return all(one.phase in OF_A_STEP and not one.script for one in running) and (
            alarm.still_seconds >= max(windows.of(Stage.LONG), cap_seconds)
        )
    # what a script does for long it may have meant: rank 0 evaluates, and the others wait in a barrier
    scripts = [one for one in running if one.phase is Phase.USER or one.script]
    busy = any(not waits(one) and one.cpu_seconds > BUSY_CPU_SECONDS for one in scripts)
    if windows.seconds is None and busy and alarm.still_seconds < LEARNED[Stage.USER][1]:
        return False
    # before its first collective a rank may still import torch, from a slow disk, on a busy machine
    late = [one for one in running if not one.ops and not waits(one)]
    idle = all(one.cpu_seconds < IDLE_CPU_SECONDS and one.state not in ("R", "D") for one in late)
    return idle or alarm.still_seconds >= windows.of(Stage.LONG)


def waits(one: Evidence) -> bool:
    """Whether a rank waits for others, or for its data."""
    if one.phase is Phase.SYNC or (one.phase is Phase.DATA and not one.script) or any(not op.done for op in one.ops):
        return True
    main = one.stacks[0].frames if one.stacks else ()
    waiting = any(activity_of(frame.file) in (Activity.WAITS, Activity.MEETS) for frame in main)
    return waiting and not imports_torch(main)


def to_free(verdict: Verdict, evidence: Sequence[Evidence]) -> tuple[int, ...]:
    """The ranks that shall get an exception out of their collective: those that have only waited."""
    kept = () if verdict.kind in GUILTY_WAIT_TOO else verdict.guilty
    return tuple(one.rank for one in evidence if one.runs and one.rank not in kept)


class Stillness:
    """When each worker of one generation moved last.

    Its clock is not asked: an age is how long the agent, by its own clock, has seen nothing of it move.
    """

    def __init__(self) -> None:
        # rank -> its counters, since when they have been so, and when they were read
        self._seen: dict[int, tuple[tuple[int, ...], float, float]] = {}

    def read(self, worker: Sample, box: int, now_seconds: float) -> Sample:
        """`worker` with what its box shows; to be called at least every second or two, on one monotonic clock."""
        counters = read_counters(box)
        moved, since_seconds, read_seconds = self._seen.get(worker.rank, ((), now_seconds, now_seconds))
        if moved != counters.moved or now_seconds - read_seconds > JUMP_SECONDS:
            since_seconds = now_seconds
        self._seen[worker.rank] = counters.moved, since_seconds, now_seconds
        return replace(
            worker,
            step=counters.step,
            phase=counters.phase,
            phase_seconds=counters.phase_seconds,
            queued_seconds=queued_seconds(worker.pid),
            still_seconds=now_seconds - since_seconds if worker.runs else 0.0,
            waiting=counters.waiting,
            met=counters.met,
            script=counters.script,
            uneven=counters.uneven,
            alone=counters.alone,
            marks=read_marks(box) if counters.marks else b"",
            orders=read_orders(box) if counters.marks else b"",
            findings=tuple(read_findings(box)) if counters.findings else (),
        )


def sample_seconds(windows: Windows) -> float:
    """How often boxes are read."""
    short = windows.seconds is not None and windows.seconds < SHORT_WINDOW_SECONDS
    return SHORT_SAMPLE_SECONDS if short else SAMPLE_SECONDS


def beat_seconds(windows: Windows, nodes: int, samples: Sequence[Sample]) -> float:
    """How often the head hears of samples and looks at them: seldom where many nodes' ranks all move."""
    usual = sample_seconds(windows)
    moves = any(one.still_seconds < QUIET_SECONDS for one in samples)
    return max(usual, nodes * SECONDS_A_NODE) if moves and usual == SAMPLE_SECONDS else usual
