"""The live state of a run: each rank's phase, speed and waiting, from the new records in the run folder.

The coordinator of a run writes the state of each rank on request (`LiveSamples` in protocol/evidence.py). Without it,
only the events of the ranks are available: their last step, and the time since then.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from paceline.guard.detectors import WORK_PHASES, PhaseSecondsByRank, find_slow_rank
from paceline.protocol.evidence import LIVE, MAX_LIVE_BYTES, WATCHED_FILE, LiveSamples, Phase, RankSample
from paceline.runs import writing
from paceline.runs.console import shorten
from paceline.runs.events import Checkpointed, Event, Started, Step, decode_event, event_files
from paceline.runs.machine import GpuUtilization, NodeUtilization, RankUtilization, decode_record, node_log_files
from paceline.runs.owners import open_file
from paceline.runs.reading import read_json_if_readable

FIRST_BYTES, MAX_READ_BYTES = 1 << 16, 1 << 20  # read from the end of a file the first time; maximum per later read
LIVE_STATE_TIMEOUT_SECONDS = 5.0  # an agent writes every second
WINDOW_STEPS = 50
MAX_HISTORY = 120
AVERAGED_READS = 10  # reads over which times are averaged


@dataclass(frozen=True)
class RankSnapshot:
    rank: int
    host: str = ""
    phase: str = ""  # empty: unknown
    end_description: str = ""
    step: int = 0
    work_seconds: tuple[float, ...] = ()  # of a step without waiting for others, at the last reads
    waiting_fraction: float | None = None  # fraction of the time in which the rank waits for others
    no_progress_seconds: float = 0.0
    resource_use: RankUtilization | None = None
    gpu: GpuUtilization | None = None
    is_slowest: bool = False
    virtual_ranks: int = 0  # the number that it computes; 0: unknown


@dataclass(frozen=True)
class RunSnapshot:
    ranks: tuple[RankSnapshot, ...] = ()
    is_reported_by_agent: bool = False  # whether the agent reports the state
    step: int | None = None
    losses: tuple[float, ...] = ()
    samples_per_second: float | None = None
    steps_per_second: float | None = None
    saved_step: int | None = None  # of the last checkpoint on disk
    machines: dict[int, NodeUtilization] = field(default_factory=dict[int, NodeUtilization])
    slow_rank_message: str = ""  # a message about the slow rank


class FileTail:
    """Reads the new lines of a file. The first call returns the lines at its end."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._offset, self._rest = path, 0, 0, b""

    def read_new_lines(self) -> Sequence[bytes]:
        with suppress(OSError), open_file(self._path) as file:
            size = file.status.st_size
            if file.status.st_ino != self._inode:  # the first read, or a writer has replaced the file
                self._offset, self._rest = size if self._inode else max(0, size - FIRST_BYTES), b""
                self._inode = file.status.st_ino
            if size - self._offset > MAX_READ_BYTES:  # skip the older part
                self._offset, self._rest = size - MAX_READ_BYTES, b""
            data = os.pread(file.descriptor, MAX_READ_BYTES, self._offset)
            self._offset += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > MAX_READ_BYTES:
                self._rest = b""
            return lines
        return ()


class RankHistory:
    def __init__(self, rank: int) -> None:
        self.host, self.node = "", 0
        self._now = RankSnapshot(rank)
        # step, seconds, waiting
        self._reads: deque[tuple[int, tuple[float, ...], bool]] = deque(maxlen=AVERAGED_READS + 1)
        self._work: deque[float] = deque(maxlen=MAX_HISTORY)
        self._last: Step | None = None

    def add_live(self, rank: RankSample) -> None:
        """Add a state from the agent."""
        ended = (
            "lost" if rank.lost_reason else "" if rank.code is None else f"ended: {rank.code}" if rank.code else "done"
        )
        # the rank was restarted or rolled back, or only its events were known
        if self._last is not None or (self._reads and rank.step < self._reads[-1][0]):
            self._reads.clear()
            self._last = None
        before, seconds, _ = self._reads[-1] if self._reads else (rank.step, (), False)
        if rank.step > before and (spent := _differences(seconds, rank.phase_seconds)):
            self._work.append(sum(spent[phase] for phase in WORK_PHASES) / (rank.step - before))
        self._reads.append((rank.step, rank.phase_seconds, rank.waiting))
        self.host, self.node = rank.host, rank.node
        self._now = replace(
            self._now, phase="" if ended else rank.phase.word, end_description=ended, step=rank.step,
            virtual_ranks=rank.own_virtual_ranks, no_progress_seconds=rank.still_seconds,
        )  # fmt: skip

    def add_step(self, step: Step) -> None:
        """Add a step from the events of the rank."""
        if self._last is None:  # the agent no longer writes
            self._reads.clear()
        self._last = step
        seconds = {**step.phase_seconds} or {"forward": step.seconds}
        self._work.append(sum(seconds.get(phase.word, 0.0) for phase in WORK_PHASES))
        before = self._reads[-1][1] if self._reads else (0.0,) * len(Phase)
        total = tuple(b + seconds.get(phase.word, 0.0) for b, phase in zip(before, Phase, strict=True))
        self._reads.append((step.step, total, False))
        first, stop = step.share or (0, 0)
        self._now = replace(self._now, step=step.step, virtual_ranks=stop - first)

    def mean_phase_seconds(self) -> tuple[float, ...] | None:
        """The mean seconds of recent steps in each phase; None: unknown."""
        if len(self._reads) < 2 or not (steps := self._reads[-1][0] - self._reads[0][0]):
            return None
        return tuple(seconds / steps for seconds in _differences(self._reads[0][1], self._reads[-1][1])) or None

    def snapshot(self) -> RankSnapshot:
        spent, still = self.mean_phase_seconds(), self._now.no_progress_seconds
        of_steps = sum(spent[phase] for phase in (*WORK_PHASES, Phase.SYNC)) if spent else 0.0
        if spent and of_steps > 0:
            waits = spent[Phase.SYNC] / of_steps
        else:  # a script: the fraction of reads at which it waited
            waits = sum(waiting for _, _, waiting in self._reads) / len(self._reads) if self._reads else None
        if self._last is not None and not self._now.phase:
            still = max(0.0, time.time() - self._last.unix_time)
        return replace(
            self._now, host=self.host, waiting_fraction=waits, work_seconds=tuple(self._work), no_progress_seconds=still
        )


def _differences(before: Sequence[float], now: Sequence[float]) -> list[float]:
    return [max(0.0, b - a) for a, b in zip(before, now, strict=True)] if len(now) == len(before) == len(Phase) else []


class LiveReader:
    """Reads the state of a run. `may_ask`: request it from the agent, with a file in the run folder."""

    def __init__(self, run_dir: Path, *, may_ask: bool) -> None:
        self.run_dir, self.may_ask = run_dir, may_ask
        self._attempt: Path | None = None
        self._live_time, self._live_seconds = 0.0, float("-inf")  # the agent's clock; local time of its last change
        self._seen_live = False  # the first state may be outdated
        self._events: dict[int, FileTail] = {}
        self._ranks: dict[int, RankHistory] = {}
        self._steps: deque[Step] = deque(maxlen=MAX_HISTORY)
        self._saved: int | None = None

    def read_snapshot(self, attempt: Path | None) -> RunSnapshot:
        """Read the current state; `attempt` is the folder of the newest start."""
        if attempt != self._attempt:
            self._attempt, self._seen_live, self._live_seconds = attempt, False, float("-inf")
            self._ranks = {}
        if self.may_ask and attempt is not None:
            # on a full disk only events are available
            with suppress(OSError), os.fdopen(writing.open_or_create(attempt / WATCHED_FILE), "r+b", 0) as file:
                os.utime(file.fileno())
        live = self._read_live(attempt) if attempt is not None else None
        with suppress(OSError):
            self._read_events(all_ranks=live is None)
        for rank in live.ranks if live is not None else ():
            self._ranks.setdefault(rank.rank, RankHistory(rank.rank)).add_live(rank)
        machines = self._read_machines()
        speed = recent_rates(self._steps)
        hosts = {rank: shorten(history.host, 30) for rank, history in self._ranks.items()}
        slow = find_slow_rank(spent, hosts) if len(spent := self._phase_seconds_by_rank()) > 1 else None
        slowest = slow.rank if slow is not None else None
        return RunSnapshot(
            ranks=tuple(_snapshot_with_use(history, machines, slowest) for _, history in sorted(self._ranks.items())),
            is_reported_by_agent=live is not None, step=self._steps[-1].step if self._steps else None,
            losses=tuple(step.loss for step in self._steps), samples_per_second=speed[0], steps_per_second=speed[1],
            saved_step=self._saved, machines=machines,
            slow_rank_message=slow.warning_text if slow is not None else "",
        )  # fmt: skip

    def _read_live(self, attempt: Path) -> LiveSamples | None:
        live = read_json_if_readable(attempt / LIVE, LiveSamples, limit_bytes=MAX_LIVE_BYTES)
        if live is None:
            return None
        now = time.monotonic()
        if live.unix_time != self._live_time:  # compare only changes: the clocks of two machines may differ
            if self._seen_live:
                self._live_seconds = now
            self._live_time = live.unix_time
        self._seen_live = True
        return live if now < self._live_seconds + LIVE_STATE_TIMEOUT_SECONDS else None

    def _read_events(self, *, all_ranks: bool) -> None:
        for rank in event_files(self.run_dir) if all_ranks else [0]:
            file = self._events.setdefault(rank, FileTail(self.run_dir / f"events-{rank}.jsonl"))
            for line in file.read_new_lines():
                if (event := decode_event(line)) is not None:
                    self._add(rank, event, all_ranks=all_ranks)

    def _add(self, rank: int, event: Event, *, all_ranks: bool) -> None:
        history = self._ranks.setdefault(rank, RankHistory(rank)) if all_ranks else None
        match event:
            case Step():
                if rank == 0:
                    self._steps.append(event)
                if history is not None:
                    history.add_step(event)
            case Started():
                if rank == 0:
                    self._steps.clear()
                if history is not None:
                    history.host = event.host
            case Checkpointed() if not event.failure:
                self._saved = event.step
            case _:
                pass

    def _read_machines(self) -> dict[int, NodeUtilization]:
        machines: dict[int, NodeUtilization] = {}
        with suppress(OSError):
            for node, path in node_log_files(self.run_dir).items():
                records = map(decode_record, reversed(FileTail(path).read_new_lines()))
                newest = next((record for record in records if isinstance(record, NodeUtilization)), None)
                if newest is not None:
                    machines[node] = newest
        return machines

    def _phase_seconds_by_rank(self) -> PhaseSecondsByRank:
        means = {rank: history.mean_phase_seconds() for rank, history in self._ranks.items()}
        known = {rank: spent for rank, spent in means.items() if spent is not None}
        return known if len(known) == len(means) else {}


def recent_rates(steps: Sequence[Step]) -> tuple[float | None, float | None]:
    """Samples and steps per second over the last steps, including evaluations and checkpoints."""
    recent = [*steps][-WINDOW_STEPS:]
    seconds = recent[-1].unix_time - recent[0].unix_time if recent else 0.0
    if not seconds > 0:
        return None, None
    return sum(later.samples for _, later in pairwise(recent)) / seconds, (len(recent) - 1) / seconds


def _snapshot_with_use(history: RankHistory, machines: dict[int, NodeUtilization], slowest: int | None) -> RankSnapshot:
    now = history.snapshot()
    now = replace(now, is_slowest=slowest == now.rank)
    nodes = sorted(machines, key=lambda node: node != history.node)
    machine = next((machines[node] for node in nodes if now.rank in machines[node].ranks), None)
    if machine is None:
        return now
    index = sorted(machine.ranks).index(now.rank)  # ranks use the GPUs of their node in order
    gpu = machine.gpus[index] if len(machine.gpus) >= len(machine.ranks) else None
    return replace(now, host=now.host or machine.host, resource_use=machine.ranks[now.rank], gpu=gpu)
