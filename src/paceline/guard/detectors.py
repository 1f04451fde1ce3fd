"""Detects stalls, slow ranks and slow networks from samples of all ranks. Without I/O.

A run stalls if no rank has made progress for a *window* and at least one rank waits. If no rank waits (a single rank, a
kernel that never ends), a step is a stall after the window of first steps. With `auto`, if a rank computes, it is a
stall only after 1800 s. The length of the window depends on the phases of the ranks and on the run:

    phase                                     --hang-timeout auto                              --hang-timeout S
    steps (forward ... optimizer)             5 x the longest gap so far, 10 s to 300 s       S
    data                                      the same, 30 s to 300 s                         S
    init, first steps, evaluate, checkpoint   5 x the longest gap so far, 300 s to 1800 s     4 x S, at least 60 s
    scripts, which report no phases           5 x the longest gap so far, 300 s to 1800 s     S

A gap is a time without progress that ended with progress. A later gap of the same length is therefore not a stall. If
the ranks are in several phases, the phase with the largest window counts. Data has a higher floor than the other parts
of a step, because its time varies more: a new epoch starts new loader processes, and a file server may be slow. First
steps compile and warm up: one step with `--hang-timeout S`, else five.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from msgspec.structs import replace

from paceline.guard.judge import DEADLOCK_SECONDS
from paceline.protocol.code_locations import FrameActivity, activity_of_source_file, is_importing_torch
from paceline.protocol.evidence import Diagnosis, DiagnosisKind, Evidence, Phase, RankSample
from paceline.protocol.job import (
    STEP_STAGES,
    SUSPENSION_GAP_SECONDS,
    WARM_UP_STEPS,
    WINDOW_BOUNDS_SECONDS,
    HangTimeout,
    TimeoutStage,
)

PROGRESS_TOLERANCE_SECONDS = 1.5  # tolerance between two samples of a rank that has made no progress
BUSY_CPU_SECONDS = 0.5  # per second
IDLE_CPU_SECONDS = 0.05  # per second; a rank that imports or compiles uses more
STEP_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
KINDS_WITH_WAITING_CAUSES = (
    DiagnosisKind.MISMATCH,
    DiagnosisKind.DEADLOCK,
    DiagnosisKind.NETWORK,
    DiagnosisKind.UNKNOWN,
)

SAMPLE_SECONDS, SHORT_SAMPLE_SECONDS = 1.0, 0.25
SHORT_WINDOW_SECONDS = 10.0
MIN_WINDOW_SECONDS = 1.0
QUIET_SECONDS, SECONDS_PER_NODE = 3.0, 0.003  # ranks of many nodes are sampled less often while all make progress


@dataclass(frozen=True)
class StallAlarm:
    """No rank has made progress for half of the window (warn), or for all of it (stall)."""

    kind: Literal["warn", "stall"]
    still_seconds: float
    window_seconds: float


class StallDetector:
    """Detects stalls of one generation. With `auto` it adapts the windows to the gaps that it measures."""

    def __init__(self, windows: HangTimeout) -> None:
        self.windows = windows
        self.notice = ""  # a message for the user; the caller empties it after printing
        self._largest_gap_seconds = dict.fromkeys(TimeoutStage, 0.0)
        self._seen_seconds: float | None = None
        self._began_seconds = -math.inf  # times without progress are counted from here at the earliest
        self._moved_seconds: float | None = None  # time of the last progress of any rank
        self._stage = TimeoutStage.LONG
        self._first_step: int | None = None
        self._warned = False  # about the current time without progress
        self._next_stall_seconds = 0.0
        self._noticed = False

    def update(self, now_seconds: float, ranks: Sequence[RankSample]) -> StallAlarm | None:
        """Process samples of all running ranks, at least once a second, with the time of one monotonic clock.

        Returns a warning once per stall, a stall alarm after each window, and otherwise None.
        """
        if self._seen_seconds is not None and now_seconds - self._seen_seconds > SUSPENSION_GAP_SECONDS:
            self._began_seconds, self._moved_seconds = now_seconds, None
        before_seconds, self._seen_seconds = self._seen_seconds, now_seconds
        if not ranks:
            self._moved_seconds = None
            return None
        moved_seconds = max(self._began_seconds, now_seconds - min(rank.still_seconds for rank in ranks))
        if self._moved_seconds is None or moved_seconds > self._moved_seconds + 1e-3:  # ages are sums of floats
            self._learn(moved_seconds, math.inf if before_seconds is None else before_seconds)
        still_seconds = now_seconds - moved_seconds
        steps = self.windows.seconds is None and self._stage in (TimeoutStage.STEP, TimeoutStage.DATA)
        if not steps or still_seconds >= MIN_WINDOW_SECONDS:  # no window is shorter than this
            self._stage = max(self._stage_of(rank) for rank in ranks)
        window_seconds = self.windows.window_seconds(self._stage, self._largest_gap_seconds[self._stage])
        if not any(rank.waiting or rank.phase in (Phase.DATA, Phase.SYNC) for rank in ranks):
            if self._stage is not TimeoutStage.STEP:
                return None
            window_seconds = self.windows.window_seconds(TimeoutStage.LONG, self._largest_gap_seconds[self._stage])
        return self._alarm(still_seconds, window_seconds)

    def _learn(self, moved_seconds: float, before_seconds: float) -> None:
        if self._moved_seconds is not None:  # with many nodes, samples are rare and miss progress between them
            seen_seconds = before_seconds + sample_interval_seconds(self.windows)
            self._add_gap(min(moved_seconds, seen_seconds) - self._moved_seconds)
        self._moved_seconds = moved_seconds
        self._warned, self._next_stall_seconds = False, 0.0

    def _add_gap(self, gap_seconds: float) -> None:
        for stage in STEP_STAGES if self._stage in STEP_STAGES else (self._stage,):
            self._largest_gap_seconds[stage] = max(self._largest_gap_seconds[stage], gap_seconds)
        limit = self.windows.seconds
        if limit is not None and gap_seconds > limit and self._stage is not TimeoutStage.LONG and not self._noticed:
            self._noticed = True
            self.notice = (
                f"no rank made progress for {gap_seconds:.1f} s, then the run continued: --hang-timeout {limit:g} is "
                f"too short for this run. Choose more than {math.ceil(gap_seconds)}, or auto"
            )

    def _alarm(self, still_seconds: float, window_seconds: float) -> StallAlarm | None:
        if still_seconds >= max(window_seconds, self._next_stall_seconds):
            self._warned = True  # the alarm makes a warning redundant
            self._next_stall_seconds = still_seconds + window_seconds
            return StallAlarm("stall", still_seconds, window_seconds)
        # no warning for gaps that the run has already had
        if still_seconds >= max(window_seconds / 2, self._largest_gap_seconds[self._stage]) and not self._warned:
            self._warned = True
            return StallAlarm("warn", still_seconds, window_seconds)
        return None

    def _stage_of(self, rank: RankSample) -> TimeoutStage:
        if rank.phase is Phase.USER or (rank.script and rank.phase is not Phase.INIT):
            return TimeoutStage.USER
        if rank.phase is Phase.INIT or rank.stepped is False or self._first_step is None:
            self._first_step = rank.step  # a resumed run starts at any step
        if rank.phase in (Phase.INIT, Phase.EVALUATE, Phase.CHECKPOINT, Phase.CLOSE) or rank.stepped is False:
            return TimeoutStage.LONG
        if self.windows.seconds is None and rank.step < self._first_step + WARM_UP_STEPS:
            return TimeoutStage.WARM_UP
        if rank.stepped is None and rank.step == self._first_step:
            return TimeoutStage.LONG
        return TimeoutStage.DATA if rank.phase is Phase.DATA else TimeoutStage.STEP


def mark_unknown_as_waiting(samples: Sequence[RankSample], world_size: int) -> list[RankSample]:
    """Set `waiting` for scripts and for ranks before the rendezvous: their status pages do not show whether they wait.

    A script is in phase INIT until a rank has called a collective.
    """
    any_met = any(sample.met for sample in samples)
    return [
        replace(sample, waiting=True, phase=sample.phase if any_met else Phase.INIT)
        if world_size > 1 and (sample.script or sample.phase in (Phase.USER, Phase.INIT))
        else sample
        for sample in samples
    ]


def is_run_stalled(evidence: Sequence[Evidence], alarm: StallAlarm, windows: HangTimeout) -> bool:
    """Whether the evidence confirms the alarm: no rank has made progress since, and a rank waits.

    A script may also compute for a long time.
    """
    running = [sample for sample in evidence if sample.is_running]
    still_seconds = min((sample.still_seconds for sample in running), default=-math.inf)
    if still_seconds < alarm.still_seconds - PROGRESS_TOLERANCE_SECONDS:
        return False
    if not any(is_waiting(sample) for sample in running):
        is_busy = any(sample.cpu_seconds > BUSY_CPU_SECONDS for sample in running)
        cap_seconds = WINDOW_BOUNDS_SECONDS[TimeoutStage.LONG][1] if windows.seconds is None and is_busy else 0.0
        return all(sample.phase in STEP_PHASES and not sample.script for sample in running) and (
            alarm.still_seconds >= max(windows.window_seconds(TimeoutStage.LONG), cap_seconds)
        )
    # long work of a script may be intended: rank 0 evaluates, and the others wait in a barrier
    scripts = [sample for sample in running if sample.phase is Phase.USER or sample.script]
    is_busy = any(not is_waiting(sample) and sample.cpu_seconds > BUSY_CPU_SECONDS for sample in scripts)
    if windows.seconds is None and is_busy and alarm.still_seconds < WINDOW_BOUNDS_SECONDS[TimeoutStage.USER][1]:
        return False
    # before its first collective a rank may still import torch from a slow disk or on a busy machine
    not_started = [sample for sample in running if not sample.ops and not is_waiting(sample)]
    is_idle = all(sample.cpu_seconds < IDLE_CPU_SECONDS and sample.state not in ("R", "D") for sample in not_started)
    return is_idle or alarm.still_seconds >= windows.window_seconds(TimeoutStage.LONG)


def is_waiting(rank: Evidence) -> bool:
    waits_for_data = rank.phase is Phase.DATA and not rank.script
    if rank.phase is Phase.SYNC or waits_for_data or any(not op.done for op in rank.ops):
        return True
    main_frames = rank.stacks[0].frames if rank.stacks else ()
    is_in_wait = any(
        activity_of_source_file(frame.file) in (FrameActivity.WAITS, FrameActivity.MEETS) for frame in main_frames
    )
    return is_in_wait and not is_importing_torch(main_frames)


def ranks_to_interrupt(diagnosis: Diagnosis, evidence: Sequence[Evidence]) -> tuple[int, ...]:
    kept = () if diagnosis.kind in KINDS_WITH_WAITING_CAUSES else diagnosis.causes
    return tuple(sample.rank for sample in evidence if sample.is_running and sample.rank not in kept)


def sample_interval_seconds(windows: HangTimeout) -> float:
    is_short = windows.seconds is not None and windows.seconds < SHORT_WINDOW_SECONDS
    return SHORT_SAMPLE_SECONDS if is_short else SAMPLE_SECONDS


def heartbeat_interval_seconds(windows: HangTimeout, nodes: int, samples: Sequence[RankSample]) -> float:
    """The interval at which the coordinator receives samples; longer while the ranks of many nodes make progress."""
    usual = sample_interval_seconds(windows)
    any_moves = any(sample.still_seconds < QUIET_SECONDS for sample in samples)
    return max(usual, nodes * SECONDS_PER_NODE) if any_moves and usual == SAMPLE_SECONDS else usual


# ---- a rank that sleeps ----

FIRST_SECONDS, SURE_SECONDS = 20.0, 45.0
SLEEP_RECHECK_SECONDS = 15.0


class SleepingRankDetector:
    """Finds a rank of a script that sleeps while others wait for it, long before the window of scripts ends.

    A script may evaluate, download, or wait for a child process for half an hour while others wait. All of these look
    like a hang. A main thread that stays in one sleep is different. The kernel shows this by the thread's state and
    its count of context switches. Only a timer can wake such a thread. If it is stopped, or if all threads wait for
    each other, nothing wakes it. The detector compares two samples, and reports no rank that has slept for less than
    45 s.
    """

    def __init__(self, windows: HangTimeout) -> None:
        self._auto = windows.seconds is None
        self._next_seconds, self._sampled = FIRST_SECONDS, False
        self._before: dict[int, int] = {}

    def should_collect(self, running: Sequence[RankSample]) -> bool:
        self._sampled = False
        still_seconds = min((s.still_seconds for s in running), default=0.0)
        if still_seconds < FIRST_SECONDS:
            self._next_seconds = FIRST_SECONDS
            self._before.clear()
        if not self._auto or still_seconds < self._next_seconds or not all(s.script and s.step for s in running):
            return False
        self._sampled = True
        self._next_seconds = max(SURE_SECONDS, still_seconds + SLEEP_RECHECK_SECONDS)
        return True

    def proves_sleep(self, diagnosis: Diagnosis, evidence: Sequence[Evidence]) -> bool | None:
        """Whether its ranks were in one sleep since the last evidence; None if `should_collect` was False."""
        if not self._sampled:
            return None
        now = {sample.rank: sample.sleep for sample in evidence if sample.sleep >= 0}
        before, self._before = self._before, now
        if min(sample.still_seconds for sample in evidence if sample.is_running) < SURE_SECONDS:
            return False
        if diagnosis.kind in (DiagnosisKind.MISMATCH, DiagnosisKind.DEADLOCK):
            return True
        return bool(diagnosis.causes) and all(r in now and before.get(r) == now[r] for r in diagnosis.causes)


# ---- a slow rank, a slow network ----

SKIPPED_FIRST_STEPS = 5  # skipped after a start: these steps compile and fill caches
LOOK_STEPS, LOOK_SECONDS = 10, 0.9  # minimum between two snapshots; averages out batches of different lengths
# minimum per rank between two snapshots, because each rank costs the coordinator microseconds
MIN_SNAPSHOT_SECONDS_PER_RANK = 0.001
MIN_SLOW_SNAPSHOTS = 3  # consecutive snapshots that must agree
MIN_QUEUED_SNAPSHOTS = 8  # the same if a rank is slow because it waits for a core
SLOW_FACTOR = 1.3
REPEAT_WARNING_FACTOR = 1.5  # a warning repeats only if the delay has grown by this factor
MIN_DELAY_SECONDS = 0.02  # per step; smaller delays are noise of a shared machine
MIN_DOUBLED_DELAY_SECONDS = 0.01  # the same for a rank that takes twice as long as the others
MIN_SLOW_SYNC_SECONDS = 0.05  # per step; shorter waits are normal for a network

WORK_PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
NEVER_WAITING_PHASES = (Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER)
SCRIPT_WORK_PHASES = (*NEVER_WAITING_PHASES, Phase.USER)

SampleSnapshot = Mapping[int, RankSample]  # of all running ranks
PhaseSecondsByRank = Mapping[int, tuple[float, ...]]  # rank -> seconds in each phase, per step


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others, in seconds per step."""

    rank: int
    host: str
    seconds_per_step: float  # work of this rank
    median_seconds_per_step: float  # work of the other ranks
    phase: Phase  # the phase with most of the difference
    num_ranks: int  # world size

    @property
    def delay_seconds_per_step(self) -> float:
        return self.seconds_per_step - self.median_seconds_per_step

    @property
    def warning_text(self) -> str:
        return (
            f"rank {self.rank} ({self.host}) is slow: it works {_seconds(self.seconds_per_step)} per step, "
            f"{'the other' if self.num_ranks == 2 else 'the others'} {_seconds(self.median_seconds_per_step)}. Most of "
            f"the difference is in {'code of the script' if self.phase is Phase.USER else self.phase.word}"
        )


class StragglerDetector:
    """Finds a rank that is slower than the others, or a slow network, from the time of each rank in each phase.

    All ranks step together, so the step time of every rank is that of the slowest one. The detector therefore compares
    the work of each rank (data, forward, backward, optimizer) with the work of the others. The rest of a step is
    waiting. If no rank works long and all wait, including the last to arrive, the network is slow.

    Example: one of 3 ranks needs 0.5 s to load a batch. Work is 0.1, 0.6, 0.1 s, and waiting 0.5, 0, 0.5 s per step.
    With DDP the waiting is in the backward pass of the others instead: 0.6, 0.1, 0.6 s. The detector therefore also
    compares only the phases that never wait (data, forward, optimizer).
    """

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._hosts = hosts
        self._first: dict[int, int] = {}
        self._snapshots: list[SampleSnapshot] = []  # the newest last
        self._stragglers: list[tuple[Straggler | None, Straggler | None]] = []  # without and with time in CPU queues
        self._reported: dict[str, float] = {}
        self.rank: int | None = None  # of the last warning

    def update(self, samples: Sequence[RankSample]) -> str:
        """A new warning, or an empty text. Call it repeatedly, with samples of all running ranks."""
        if len(samples) < 2 or any(sample.phase is Phase.USER and not sample.script for sample in samples):
            return ""
        steps = [sample.step - self._first.setdefault(sample.rank, sample.step) for sample in samples]
        now = {sample.rank: sample for sample in samples}
        if min(steps) < SKIPPED_FIRST_STEPS or (self._snapshots and not _are_apart(self._snapshots[-1], now)):
            return ""
        self._snapshots = [*self._snapshots, now][-MIN_SLOW_SNAPSHOTS - 1 :]
        if len(self._snapshots) == 1:
            return ""
        all_scripts = all(sample.script for sample in samples)
        find, previous = find_slow_script_rank if all_scripts else find_slow_rank, self._snapshots[-2]
        without_queues, with_queues = (
            find(_per_step(previous, now, subtract_queues=subtract), self._hosts) for subtract in (True, False)
        )
        self._stragglers = [*self._stragglers, (without_queues, with_queues)][-MIN_QUEUED_SNAPSHOTS:]
        if len(self._stragglers) < MIN_SLOW_SNAPSHOTS:
            return ""
        straggler = self._persistent_straggler()
        self.rank = straggler.rank if straggler else None
        if straggler:
            return self._drop_repeated(f"rank {self.rank}", straggler.warning_text, straggler.delay_seconds_per_step)
        if all_scripts:  # their phases do not show what is work and what is waiting
            return ""
        return self._drop_repeated("network", *(find_slow_network(_per_step(self._snapshots[0], now)) or ("", 0.0)))

    def _persistent_straggler(self) -> Straggler | None:
        """The rank that is slow in each of the last snapshots, with its median delay: some steps of a script are short.

        A rank that waits for a core is usually slow for a short time only, so it must be slow in more snapshots.
        """
        for count, index in ((MIN_SLOW_SNAPSHOTS, 0), (MIN_QUEUED_SNAPSHOTS, 1)):
            slow = [straggler for pair in self._stragglers[-count:] if (straggler := pair[index]) is not None]
            if len(slow) == count and len({straggler.rank for straggler in slow}) == 1:
                return sorted(slow, key=lambda straggler: straggler.delay_seconds_per_step)[count // 2]
        return None

    def _drop_repeated(self, subject: str, warning: str, delay_seconds: float) -> str:
        if delay_seconds <= self._reported.get(subject, 0.0) * REPEAT_WARNING_FACTOR:
            return ""
        self._reported[subject] = delay_seconds
        return warning


def _are_apart(base: SampleSnapshot, now: SampleSnapshot) -> bool:
    seconds = max(LOOK_SECONDS, len(now) * MIN_SNAPSHOT_SECONDS_PER_RANK)
    return all(
        rank in base
        and sample.step >= base[rank].step + LOOK_STEPS
        and sum(sample.phase_seconds) >= sum(base[rank].phase_seconds) + seconds
        for rank, sample in now.items()
    )


def _per_step(base: SampleSnapshot, now: SampleSnapshot, *, subtract_queues: bool = False) -> PhaseSecondsByRank:
    """The time of each rank in each phase.

    `subtract_queues` subtracts the time that a rank has waited for a core longer than the others. The kernel does not
    show in which phase it waited, so the function reduces all phases of its work in proportion.
    """
    queued = {rank: (sample.queued_seconds - base[rank].queued_seconds) for rank, sample in now.items()}
    ordered = sorted(queued.values())
    per_step: dict[int, tuple[float, ...]] = {}
    for rank, sample in now.items():
        spent = [b - a for a, b in zip(base[rank].phase_seconds, sample.phase_seconds, strict=True)]
        work = sum(spent[phase] for phase in SCRIPT_WORK_PHASES)
        subtract = subtract_queues and len(now) > 1
        excess = max(0.0, queued[rank] - median_without(ordered, queued[rank])) if subtract else 0.0
        kept = max(0.0, 1 - excess / work) if work else 1.0
        steps = sample.step - base[rank].step
        per_step[rank] = tuple(
            seconds * (kept if phase in SCRIPT_WORK_PHASES else 1) / steps
            for phase, seconds in zip(Phase, spent, strict=True)
        )
    return per_step


def find_slow_rank(spent: PhaseSecondsByRank, hosts: Mapping[int, str]) -> Straggler | None:
    all_work = _seconds_in(spent, WORK_PHASES)
    for phases in (WORK_PHASES, NEVER_WAITING_PHASES):
        work = _seconds_in(spent, phases)
        rank = max(work, key=lambda r: work[r])
        usual = _median_of_others(work, rank)
        if work[rank] - usual >= max(MIN_DELAY_SECONDS, (SLOW_FACTOR - 1) * _median_of_others(all_work, rank)):
            phase = _slow_phase(spent, rank, phases)
            return Straggler(rank, hosts.get(rank, "?"), work[rank], usual, phase, len(spent))
    return None


def _seconds_in(spent: PhaseSecondsByRank, phases: Sequence[Phase]) -> dict[int, float]:
    return {rank: sum(seconds[phase] for phase in phases) for rank, seconds in spent.items()}


def _slow_phase(spent: PhaseSecondsByRank, rank: int, phases: Sequence[Phase] = SCRIPT_WORK_PHASES) -> Phase:
    seconds_by_phase = {phase: _seconds_in(spent, (phase,)) for phase in phases}
    return max(phases, key=lambda p: seconds_by_phase[p][rank] - _median_of_others(seconds_by_phase[p], rank))


def find_slow_script_rank(spent: PhaseSecondsByRank, hosts: Mapping[int, str]) -> Straggler | None:
    """As `find_slow_rank`, for the phases that hooks report: a rank is slow only if the others wait for its delay."""
    work, waits = _seconds_in(spent, SCRIPT_WORK_PHASES), _seconds_in(spent, (Phase.BACKWARD, Phase.SYNC))
    rank = max(work, key=lambda r: work[r])
    usual, excess = _median_of_others(work, rank), work[rank] - _median_of_others(work, rank)
    least_excess = min(max(MIN_DELAY_SECONDS, (SLOW_FACTOR - 1) * usual), max(MIN_DOUBLED_DELAY_SECONDS, usual))
    if excess < least_excess or _median_of_others(waits, rank) - waits[rank] < excess / 2:
        return None
    return Straggler(rank, hosts.get(rank, "?"), work[rank], usual, _slow_phase(spent, rank), len(spent))


def find_slow_network(spent: PhaseSecondsByRank) -> tuple[str, float] | None:
    """The warning and the seconds per step, if every rank waits longer than any rank works; else None."""
    work, sync_seconds = _seconds_in(spent, WORK_PHASES), min(seconds[Phase.SYNC] for seconds in spent.values())
    if sync_seconds < MIN_SLOW_SYNC_SECONDS or sync_seconds <= max(work.values()):
        return None
    warning = (
        f"slow network or collective: every rank waits at least {_seconds(sync_seconds)} per step for the others, and "
        f"works {_seconds(median(work.values()))}"
    )
    return warning, sync_seconds


def _median_of_others(values: Mapping[int, float], rank: int) -> float:
    return median_without(sorted(values.values()), values[rank])


def median_without(ordered: Sequence[float], value: float) -> float:
    """The median of the sorted values `ordered` without one `value`, without sorting again for each of many ranks."""
    index, remaining = bisect_left(ordered, value), len(ordered) - 1
    low, high = (remaining - 1) // 2, remaining // 2
    return (ordered[low + (low >= index)] + ordered[high + (high >= index)]) / 2


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.0f} ms"


# ---- collectives that can never complete ----

MAX_DEADLOCK_SECONDS = 8.0  # upper limit of DEADLOCK_SECONDS, for runs whose ranks often wait this long
SAME_MOMENT_TOLERANCE_SECONDS = 1.5  # tolerance between two samples of the same moment


class DeadlockCheckSchedule:
    """Decides when to collect evidence for `judge.is_deadlocked`, for one generation."""

    def __init__(self, windows: HangTimeout) -> None:
        self._off = windows.off
        self._after_seconds, self._next_seconds = DEADLOCK_SECONDS, 0.0
        self._checked: dict[int, float] = {}  # rank -> the time of its last progress, at the last check

    def should_collect(self, now_seconds: float, running: Sequence[RankSample]) -> bool:
        """Whether at least two ranks have waited long enough, and one of them has made progress since the last check.

        Each check that finds nothing doubles the time for which ranks must have waited, up to MAX_DEADLOCK_SECONDS.
        """
        if self._off or now_seconds < self._next_seconds:
            return False
        waiting = [sample for sample in running if sample.waiting and sample.still_seconds >= self._after_seconds]
        since = {sample.rank: now_seconds - sample.still_seconds for sample in waiting}
        checked = {rank: self._checked.get(rank, -math.inf) + SAME_MOMENT_TOLERANCE_SECONDS for rank in since}
        if len(since) < 2 or all(at <= checked[rank] for rank, at in since.items()):
            return False
        self._checked = since
        self._after_seconds = min(2 * self._after_seconds, MAX_DEADLOCK_SECONDS)
        self._next_seconds = now_seconds + self._after_seconds
        return True
