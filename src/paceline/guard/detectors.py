"""Finds when a run stalls, and which rank or network slows it down. Pure: from samples of all ranks.

A stall: no rank has moved for a *window*, and at least one rank waits for something. A step in which no rank waits (a
run of one rank, a kernel without end) is a stall after the window of first steps, and under auto, if a rank computes,
after 1800 s. The length of the window depends on the phases of the ranks, and on the run:

    phase                                     --stall-after auto                              --stall-after S
    steps (forward ... optimizer)             5 x the longest gap so far, 10 s to 300 s       S
    data                                      the same, 30 s to 300 s                         S
    init, first steps, evaluate, checkpoint   5 x the longest gap so far, 300 s to 1800 s     4 x S, at least 60 s
    scripts, which report no phases           5 x the longest gap so far, 300 s to 1800 s     S

A gap is a time in which no rank moved and after which a rank did: a gap that has ended well is no stall the next time.
If the ranks are in several phases, the one with the largest window counts. Data has a higher floor than the other parts
of a step, since it does not repeat exactly: a new epoch starts new loader processes, a file server may be slow. First
steps are those that compile and warm up: one step if the user has given a number, else five.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from msgspec.structs import replace

from paceline.guard.judge import DEADLOCK_SECONDS
from paceline.protocol.evidence import Evidence, Phase, Sample, Verdict, VerdictKind
from paceline.protocol.job import JUMP_SECONDS, LEARNED, OF_STEPS, WARM_UP_STEPS, Stage, Windows
from paceline.protocol.places import Activity, activity_of, imports_torch

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
    """No rank has moved for half of the window (warn), or for all of it (stall)."""

    kind: Literal["warn", "stall"]
    still_seconds: float
    window_seconds: float


class StallDetector:
    """Detects stalls of one generation, by the pace that it learns while the generation runs."""

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
        """Process samples of all ranks that run, at least once a second; `now_seconds` is of one monotonic clock.

        A warning is returned once in a stall, an alarm again after each further window, and else None.
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


def assume_waiting(samples: Sequence[Sample], world_size: int) -> list[Sample]:
    """The samples, with `waiting` for scripts and ranks before the rendezvous: no box shows whether these wait.

    A script is in its start until a rank has called a collective.
    """
    met = any(one.met for one in samples)
    return [
        replace(one, waiting=True, phase=one.phase if met else Phase.INIT)
        if world_size > 1 and (one.script or one.phase in (Phase.USER, Phase.INIT))
        else one
        for one in samples
    ]


def is_stalled(evidence: Sequence[Evidence], alarm: Alarm, windows: Windows) -> bool:
    """Whether no rank has moved since the alarm, and a rank waits: a script may also compute for a long time."""
    running = [one for one in evidence if one.runs]
    if any(one.reads_input for one in running):  # a person thinks, or what is piped into the run has a pause
        return False
    if not running or min(one.still_seconds for one in running) < alarm.still_seconds - CLOCKS_SECONDS:
        return False
    if not any(is_waiting(one) for one in running):
        busy = any(one.cpu_seconds > BUSY_CPU_SECONDS for one in running)
        cap_seconds = LEARNED[Stage.LONG][1] if windows.seconds is None and busy else 0.0
        return all(one.phase in OF_A_STEP and not one.script for one in running) and (
            alarm.still_seconds >= max(windows.of(Stage.LONG), cap_seconds)
        )
    # what a script does for long it may have meant: rank 0 evaluates, and the others wait in a barrier
    scripts = [one for one in running if one.phase is Phase.USER or one.script]
    busy = any(not is_waiting(one) and one.cpu_seconds > BUSY_CPU_SECONDS for one in scripts)
    if windows.seconds is None and busy and alarm.still_seconds < LEARNED[Stage.USER][1]:
        return False
    # before its first collective a rank may still import torch, from a slow disk, on a busy machine
    late = [one for one in running if not one.ops and not is_waiting(one)]
    idle = all(one.cpu_seconds < IDLE_CPU_SECONDS and one.state not in ("R", "D") for one in late)
    return idle or alarm.still_seconds >= windows.of(Stage.LONG)


def is_waiting(one: Evidence) -> bool:
    """Whether a rank waits for other ranks, or for its data."""
    if one.phase is Phase.SYNC or (one.phase is Phase.DATA and not one.script) or any(not op.done for op in one.ops):
        return True
    main = one.stacks[0].frames if one.stacks else ()
    waiting = any(activity_of(frame.file) in (Activity.WAITS, Activity.MEETS) for frame in main)
    return waiting and not imports_torch(main)


def ranks_to_unblock(verdict: Verdict, evidence: Sequence[Evidence]) -> tuple[int, ...]:
    """The ranks that get an exception out of their collective: those that only wait."""
    kept = () if verdict.kind in GUILTY_WAIT_TOO else verdict.guilty
    return tuple(one.rank for one in evidence if one.runs and one.rank not in kept)


def sample_seconds(windows: Windows) -> float:
    """How often boxes are read."""
    short = windows.seconds is not None and windows.seconds < SHORT_WINDOW_SECONDS
    return SHORT_SAMPLE_SECONDS if short else SAMPLE_SECONDS


def heartbeat_seconds(windows: Windows, nodes: int, samples: Sequence[Sample]) -> float:
    """How often the head receives samples and looks at them: less often if the ranks of many nodes all move."""
    usual = sample_seconds(windows)
    moves = any(one.still_seconds < QUIET_SECONDS for one in samples)
    return max(usual, nodes * SECONDS_A_NODE) if moves and usual == SAMPLE_SECONDS else usual


# ---- a rank that sleeps ----

FIRST_SECONDS, SURE_SECONDS = 20.0, 45.0
AGAIN_SECONDS = 15.0


class SleepDetector:
    """Finds a rank of a script that sleeps while others wait for it, long before the window of scripts is over.

    A script may evaluate for half an hour while others wait, download, or wait for a program that it has started: all
    of these look like a hang. A main thread that is in one sleep all the time, by the kernel's state and its count of
    switches, is different: only its clock wakes it, or nothing at all if it is stopped, or waits for one of its threads
    while all of them wait. So the rank is asked twice, and no rank is ended that has slept for less than 45 s.
    """

    def __init__(self, windows: Windows) -> None:
        self._auto = windows.seconds is None
        self._next_seconds, self._asked = FIRST_SECONDS, False
        self._before: dict[int, int] = {}

    def due(self, running: Sequence[Sample]) -> bool:
        """Whether to ask now how the ranks sleep."""
        self._asked = False
        still_seconds = min((one.still_seconds for one in running), default=0.0)
        if still_seconds < FIRST_SECONDS:
            self._next_seconds = FIRST_SECONDS
            self._before.clear()
        if not self._auto or still_seconds < self._next_seconds or not all(one.script and one.step for one in running):
            return False
        self._asked = True
        self._next_seconds = max(SURE_SECONDS, still_seconds + AGAIN_SECONDS)
        return True

    def proves(self, verdict: Verdict, evidence: Sequence[Evidence]) -> bool | None:
        """Whether the ranks of the verdict were in one sleep since the last question; None if there was none."""
        if not self._asked:
            return None
        now = {one.rank: one.sleep for one in evidence if one.sleep >= 0}
        before, self._before = self._before, now
        if min(one.still_seconds for one in evidence if one.runs) < SURE_SECONDS:
            return False
        if verdict.kind in (VerdictKind.MISMATCH, VerdictKind.DEADLOCK):
            return True
        return bool(verdict.guilty) and all(rank in now and before.get(rank) == now[rank] for rank in verdict.guilty)


# ---- a slow rank, a slow network ----

FIRST_STEPS = 5  # of a start: compiling, filling caches
LOOK_STEPS, LOOK_SECONDS = 10, 0.9  # from look to look, at least: batches of unlike lengths even out
RANK_SECONDS = 0.001  # the same for each rank, of many: a look takes the head some microseconds for each
LOOKS = 3  # in a row that are judged
QUEUED_LOOKS = 8  # that are where a rank is slow because it waits for a core
SLOW_FACTOR = 1.3
CHANGE_FACTOR = 1.5  # said again only where it has become so much worse
LEAST_SECONDS = 0.02  # a step: less is the noise of a machine that does something else, too
LEAST_OF_TWICE = 0.01  # the same of a rank that takes twice as long as the others
LEAST_SYNC_SECONDS = 0.05  # a step: where all is faster than that, the network does what it can

OWN = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
NEVER_WAITING = (Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER)
OF_SCRIPTS = (*NEVER_WAITING, Phase.USER)

Look = Mapping[int, Sample]  # of all ranks that run
Spent = Mapping[int, tuple[float, ...]]  # rank -> seconds in each phase, per step


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others, in seconds a step."""

    rank: int
    host: str
    seconds: float  # of its own work
    usual_seconds: float  # of the others
    phase: Phase  # that has most of the difference
    ranks: int  # of the world

    @property
    def words(self) -> str:
        """The warning."""
        return (
            f"rank {self.rank} ({self.host}) is slow: {_seconds(self.seconds)} of its own work a step, "
            f"{'the other' if self.ranks == 2 else 'the others'} {_seconds(self.usual_seconds)}; most of it in "
            f"{'its own code' if self.phase is Phase.USER else self.phase.word}"
        )


class StragglerDetector:
    """Finds a rank that is slower than the others, or a slow network, from the time that each spends in each phase.

    In lockstep all ranks are as slow as the slowest, so step times show nothing. The detector compares the work of each
    rank (data, forward, backward, optimizer) with that of the others; the rest of a step is waiting. If no rank works
    long and all wait, including the last to arrive, the network is slow.

    Example: 3 ranks, of which one needs 0.5 s to load a batch: own times 0.1, 0.6, 0.1 s, waiting 0.5, 0, 0.5 s a step.
    With DDP the waiting is in the others' backward pass instead, 0.6, 0.1, 0.6 s; so phases that never wait (data,
    forward, optimizer) are also compared alone.
    """

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._hosts = hosts
        self._first: dict[int, int] = {}
        self._looks: list[Look] = []  # the newest last
        self._judged: list[tuple[Straggler | None, Straggler | None]] = []  # per look: without queues, with
        self._said: dict[str, float] = {}
        self.rank: int | None = None
        """that the last sentence was about"""

    def see(self, samples: Sequence[Sample]) -> str:
        """A new warning, or an empty text. Call it repeatedly, with samples of all ranks that run."""
        if len(samples) < 2 or any(one.phase is Phase.USER and not one.script for one in samples):
            return ""
        first = [self._first.setdefault(one.rank, one.step) for one in samples]
        now = {one.rank: one for one in samples}
        started = all(one.step >= step + FIRST_STEPS for one, step in zip(samples, first, strict=True))
        if not started or (self._looks and not _apart(self._looks[-1], now)):
            return ""
        self._looks = [*self._looks, now][-LOOKS - 1 :]
        if len(self._looks) == 1:
            return ""
        scripts = all(one.script for one in samples)
        judge, last = slow_script if scripts else slow_rank, self._looks[-2]
        found = [judge(_per_step(last, now, of_queue=of_queue), self._hosts) for of_queue in (True, False)]
        self._judged = [*self._judged, (found[0], found[1])][-QUEUED_LOOKS:]
        if len(self._judged) < LOOKS:
            return ""
        slow = self._all_the_time()
        self.rank = slow.rank if slow else None
        if slow:
            return self._new(f"rank {self.rank}", slow.words, slow.seconds - slow.usual_seconds)
        if scripts:  # of which nobody knows what they do for themselves
            return ""
        return self._new("network", *(slow_network(_per_step(self._looks[0], now)) or ("", 0.0)))

    def _all_the_time(self) -> Straggler | None:
        """The rank that is slow in each look, with its usual delay: some steps of a script are short.

        A rank that waits for a core is mostly slow for a short time, by its machine; it has to be slow for longer.
        """
        for count, which in ((LOOKS, 0), (QUEUED_LOOKS, 1)):
            slow = [one for pair in self._judged[-count:] if (one := pair[which]) is not None]
            if len(slow) == count and len({one.rank for one in slow}) == 1:
                return sorted(slow, key=lambda one: one.seconds - one.usual_seconds)[count // 2]
        return None

    def _new(self, what: str, words: str, measure: float) -> str:
        if measure <= self._said.get(what, 0.0) * CHANGE_FACTOR:
            return ""
        self._said[what] = measure
        return words


def _apart(base: Look, now: Look) -> bool:
    """Whether every rank has taken enough steps since `base` for another look."""
    seconds = max(LOOK_SECONDS, len(now) * RANK_SECONDS)
    return all(
        rank in base
        and one.step >= base[rank].step + LOOK_STEPS
        and sum(one.phase_seconds) >= sum(base[rank].phase_seconds) + seconds
        for rank, one in now.items()
    )


def _per_step(base: Look, now: Look, *, of_queue: bool = False) -> Spent:
    """The time of each rank in each phase; `of_queue`: without the time that it waited for a core beyond the others.

    The phase in which it waited is not known, so the time is subtracted from all phases of its work, in proportion.
    """
    queued = {rank: (one.queued_seconds - base[rank].queued_seconds) for rank, one in now.items()}
    ordered = sorted(queued.values())
    found: dict[int, tuple[float, ...]] = {}
    for rank, one in now.items():
        spent = [b - a for a, b in zip(base[rank].phase_seconds, one.phase_seconds, strict=True)]
        work = sum(spent[phase] for phase in OF_SCRIPTS)
        longer = max(0.0, queued[rank] - median_without(ordered, queued[rank])) if of_queue and len(now) > 1 else 0.0
        kept = max(0.0, 1 - longer / work) if work else 1.0
        steps = one.step - base[rank].step
        found[rank] = tuple(
            seconds * (kept if phase in OF_SCRIPTS else 1) / steps for phase, seconds in zip(Phase, spent, strict=True)
        )
    return found


def slow_rank(spent: Spent, hosts: Mapping[int, str]) -> Straggler | None:
    """The rank that is slower than the others, if any, of two ranks or more."""
    own = {rank: sum(seconds[phase] for phase in OWN) for rank, seconds in spent.items()}
    alone = {rank: sum(seconds[phase] for phase in NEVER_WAITING) for rank, seconds in spent.items()}
    for work in (own, alone):
        rank = max(work, key=lambda r: work[r])
        usual, excess = _others(work, rank), work[rank] - _others(work, rank)
        if excess >= max(LEAST_SECONDS, (SLOW_FACTOR - 1) * _others(own, rank)):
            break
    else:
        return None
    each = [{r: seconds[phase] for r, seconds in spent.items()} for phase in Phase]
    phase = max(NEVER_WAITING if work is alone else OWN, key=lambda p: each[p][rank] - _others(each[p], rank))
    return Straggler(rank, hosts.get(rank, "?"), work[rank], usual, phase, len(spent))


def slow_script(spent: Spent, hosts: Mapping[int, str]) -> Straggler | None:
    """As `slow_rank`, for phases as hooks see them: a rank is slow if the others wait for as long."""
    work = {rank: sum(seconds[phase] for phase in OF_SCRIPTS) for rank, seconds in spent.items()}
    waits = {rank: seconds[Phase.BACKWARD] + seconds[Phase.SYNC] for rank, seconds in spent.items()}
    rank = max(work, key=lambda r: work[r])
    usual, excess = _others(work, rank), work[rank] - _others(work, rank)
    least = min(max(LEAST_SECONDS, (SLOW_FACTOR - 1) * usual), max(LEAST_OF_TWICE, usual))
    if excess < least or _others(waits, rank) - waits[rank] < excess / 2:
        return None
    each = {phase: {r: seconds[phase] for r, seconds in spent.items()} for phase in OF_SCRIPTS}
    phase = max(each, key=lambda p: each[p][rank] - _others(each[p], rank))
    return Straggler(rank, hosts.get(rank, "?"), work[rank], usual, phase, len(spent))


def slow_network(spent: Spent) -> tuple[str, float] | None:
    """The warning and the seconds a step, if all ranks wait most of the time, including the one that waits least."""
    own = {rank: sum(seconds[phase] for phase in OWN) for rank, seconds in spent.items()}
    sync_seconds = min(seconds[Phase.SYNC] for seconds in spent.values())
    if sync_seconds < LEAST_SYNC_SECONDS or sync_seconds <= max(own.values()):
        return None
    words = (
        f"slow network or collective: every rank waits at least {_seconds(sync_seconds)} a step for the others, and "
        f"works {_seconds(median(own.values()))}"
    )
    return words, sync_seconds


def _others(of: Mapping[int, float], rank: int) -> float:
    """The median of the others."""
    return median_without(sorted(of.values()), of[rank])


def median_without(ordered: Sequence[float], value: float) -> float:
    """The median of all but one `value`; for each of thousands of ranks they are not sorted again."""
    at, left = bisect_left(ordered, value), len(ordered) - 1
    low, high = (left - 1) // 2, left // 2
    return (ordered[low + (low >= at)] + ordered[high + (high >= at)]) / 2


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.0f} ms"


# ---- ranks that can never meet ----

MAX_DEADLOCK_SECONDS = 8.0  # as DEADLOCK_SECONDS, in a run whose ranks often wait as long for a good reason
SAME_SECONDS = 1.5  # what two looks at the same moment may differ by


class DeadlockDetector:
    """When to ask the ranks of one generation for their operations: they may never meet, see `judge.is_deadlocked`."""

    def __init__(self, windows: Windows) -> None:
        self._off = windows.off
        self._after_seconds, self._next_seconds = DEADLOCK_SECONDS, 0.0
        self._asked: dict[int, float] = {}  # rank -> since when it had not moved, at the last question

    def due(self, now_seconds: float, running: Sequence[Sample]) -> bool:
        """Whether to ask: two ranks or more have waited for long enough, and one of them has moved since last time.

        Each question that finds nothing doubles the time for which ranks must have waited, up to MAX_DEADLOCK_SECONDS.
        """
        if self._off or now_seconds < self._next_seconds:
            return False
        still = [one for one in running if one.waiting and one.still_seconds >= self._after_seconds]
        since = {one.rank: now_seconds - one.still_seconds for one in still}
        if len(since) < 2 or all(self._is_known(rank, at) for rank, at in since.items()):
            return False
        self._asked = since
        self._after_seconds = min(2 * self._after_seconds, MAX_DEADLOCK_SECONDS)
        self._next_seconds = now_seconds + self._after_seconds
        return True

    def _is_known(self, rank: int, since_seconds: float) -> bool:
        return since_seconds <= self._asked.get(rank, float("-inf")) + SAME_SECONDS
