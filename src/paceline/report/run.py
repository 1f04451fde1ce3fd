"""The contents of a run folder, in bounded memory: steps of each rank, evaluations, checkpoints, failures, machines.

If a part cannot be read, `unreadable_parts` has the reason: an incomplete report is better than none.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import PacelineError, UsageError
from paceline.guard.report import DiagnosisRecord, read_diagnosis
from paceline.protocol.evidence import Failure
from paceline.runs.attempt import ScriptNotice, read_notices
from paceline.runs.console import remove_control_characters
from paceline.runs.events import (
    Ended,
    Event,
    FlopsCounted,
    MemoryBreakdown,
    RolledBack,
    SampleIndices,
    Started,
    Step,
    TracedStep,
    decode_event,
    event_files,
)
from paceline.runs.folder import CONFIG, attempt_dirs, failure_file_names
from paceline.runs.machine import ClockOffset, NodeUtilization, decode_record, node_log_files
from paceline.runs.reading import list_folders, read_json, read_lines, read_toml
from paceline.runs.summary import Summary, read_summary

PHASES = ("data", "forward", "backward", "sync", "optimizer")
MAX_EVENTS, MAX_LISTED = 2000, 64  # per rank and kind; micro-batches whose samples are listed
MAX_RANKS, MAX_CHARS = 4096, 2000
MAX_BYTES, MAX_TRACED = 1 << 30, 64 * MAX_EVENTS  # of all ranks
MAX_LINE_BYTES, ANATOMY = 1 << 15, b'{"kind":"anatomy"'  # lines of this kind may be longer
MAX_MACHINE_RECORDS = 20_000  # per machine
MAX_DIAGNOSES, MAX_MISSING = 100, 100


class StepColumns:
    """The steps of one rank in the order of its file, as columns, which need little memory."""

    def __init__(self) -> None:
        self.step, self.epoch = array("q"), array("q")
        self.samples, self.consumed = array("q"), array("q")  # of the global batch; of this rank
        self.covered = array("q")  # number of steps in the record
        self.ended, self.seconds = array("d"), array("d")  # Unix time on node 0's clock
        self.loss, self.lr, self.norm = array("d"), array("d"), array("d")  # norm: NaN if unknown
        self.follows = array("b")  # 1: immediately follows the row before
        self.phases = tuple(array("d") for _ in PHASES)

    def add(self, event: Step, *, follows: bool) -> None:
        self.follows.append(follows)
        self.step.append(event.step)
        self.epoch.append(event.epoch)
        self.covered.append(event.steps)
        self.samples.append(event.samples)
        self.consumed.append(event.consumed)
        self.ended.append(event.unix_time)
        self.seconds.append(event.seconds)
        self.loss.append(event.loss if not event.skipped else float("nan"))
        self.lr.append(event.lr)
        self.norm.append(float("nan") if event.grad_norm is None else event.grad_norm)
        spent, (data, forward, backward, sync, optimizer) = event.phase_seconds.get, self.phases
        data.append(spent("data", event.data_seconds))  # no loop: a file may have a million steps
        forward.append(spent("forward", 0.0))
        backward.append(spent("backward", 0.0))
        sync.append(spent("sync", 0.0))
        optimizer.append(spent("optimizer", 0.0))


@dataclass
class RankEvents:
    """The events of one rank over all starts."""

    rank: int
    max_traced: int = MAX_EVENTS
    start_events: list[Started] = field(default_factory=list[Started])
    steps: StepColumns = field(default_factory=StepColumns)
    valid_rows: array[int] = field(default_factory=lambda: array("q"))
    """The rows of `steps` that later starts have not repeated."""
    discarded: int = 0
    idle_seconds: float = 0.0  # between starts
    virtual_ranks: tuple[int, int] | None = None  # the virtual ranks [a, b) that it computes
    samples: list[SampleIndices] = field(default_factory=list[SampleIndices])  # of the first step that lists them
    memory: MemoryBreakdown | None = None  # the newest
    traced: dict[int, TracedStep] = field(default_factory=dict[int, TracedStep])
    events: list[tuple[float, Event]] = field(default_factory=list[tuple[float, Event]])
    """Evaluations, checkpoints, notices, skipped steps and the end, with their approximate times."""

    _after_step = False

    def add_event(self, event: Event) -> None:
        steps, follows = self.steps, self._after_step
        is_detail = isinstance(event, TracedStep | MemoryBreakdown | FlopsCounted)
        self._after_step = isinstance(event, Step) or (follows and is_detail)
        match event:
            case Step():
                steps.add(event, follows=follows and event.steps == 1)
                self._after_step = event.steps == 1
                self.valid_rows.append(len(steps.step) - 1)
                self.virtual_ranks = event.share
            case SampleIndices():
                if not self.samples or (self.samples[0].step == event.step and len(self.samples) < MAX_LISTED):
                    self.samples.append(event)
            case FlopsCounted():
                pass
            case TracedStep():
                self.traced[event.step] = event
                if len(self.traced) > self.max_traced:
                    del self.traced[next(iter(self.traced))]
            case MemoryBreakdown():
                self.memory = event
            case Started():
                if self.start_events:
                    self.idle_seconds += max(0.0, event.unix_time - self._last_unix_time())
                del self.start_events[MAX_EVENTS:]
                self.start_events.append(event)
                self._discard_after(event.start_step)
            case RolledBack():
                self._discard_after(event.to)
                self._append_event(event)
            case _:
                self._append_event(event)

    def _discard_after(self, step: int) -> None:
        while self.valid_rows and self.steps.step[self.valid_rows[-1]] > step:
            self.valid_rows.pop()
            self.discarded += 1

    def _append_event(self, event: Event) -> None:
        unix_time = event.unix_time if isinstance(event, Ended) else 0.0
        if len(self.events) < MAX_EVENTS:
            self.events.append((unix_time or self._last_unix_time(), event))

    def _last_unix_time(self) -> float:
        return max([*self.steps.ended[-1:], *(start.unix_time for start in self.start_events[-1:])], default=0.0)

    def events_of(self, kind: type[Event]) -> Iterator[tuple[float, Any]]:
        return ((at, event) for at, event in self.events if isinstance(event, kind))


@dataclass
class RunData:
    folder: Path
    state: str = ""  # done, failed, running, ...: see `paceline status`
    state_details: str = ""  # details of the state
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """The settings of config.toml, without the names of the tables."""
    environment: dict[str, Any] = field(default_factory=dict[str, Any])
    summary: Summary | None = None
    ranks: dict[int, RankEvents] = field(default_factory=dict[int, RankEvents])
    machines: dict[int, list[NodeUtilization]] = field(default_factory=dict[int, list[NodeUtilization]])
    # the newest clock offset of each node
    clock_offsets: dict[int, ClockOffset] = field(default_factory=dict[int, ClockOffset])
    failures: list[Failure] = field(default_factory=list[Failure])  # the failures that ranks recorded, in all starts
    diagnoses: list[DiagnosisRecord] = field(default_factory=list[DiagnosisRecord])
    notices: list[ScriptNotice] = field(default_factory=list[ScriptNotice])  # the notices of the agent, in all starts
    starts: int = 0
    unreadable_parts: list[str] = field(default_factory=list[str])  # the parts that could not be read, with the reasons

    @property
    def name(self) -> str:
        return remove_control_characters(self.folder.name)[:120] or str(self.folder)

    @property
    def first_rank_log(self) -> RankEvents | None:
        """The lowest rank with events. It provides the global values."""
        return next((log for log in self.ranks.values() if log.start_events), None)

    @property
    def newest_start(self) -> Started | None:
        return self.first_rank_log.start_events[-1] if self.first_rank_log else None

    @property
    def world_size(self) -> int:
        of_summary = self.summary.world_size if self.summary else None
        return (self.newest_start.world_size if self.newest_start else of_summary) or 0

    @property
    def hosts(self) -> dict[int, str]:
        size = self.world_size
        return {rank: log.start_events[-1].host for rank, log in self.ranks.items() if log.start_events and rank < size}

    @property
    def strategy(self) -> str:
        of_summary = self.summary.strategy if self.summary else None
        return str(of_summary or self.settings.get("strategy") or "")

    def newest_rank_logs(self) -> list[RankEvents]:
        logs = (self.ranks.get(rank) for rank in range(self.world_size))
        return [log for log in logs if log is not None and log.start_events]


def read_run(folder: Path) -> RunData:
    run = RunData(folder)
    with _recording_errors(run, CONFIG):
        run.settings = _flat(read_toml(folder / CONFIG))
    with _recording_errors(run, "environment.json"):
        run.environment = read_json(folder / "environment.json", dict[str, Any])
    run.summary = read_summary(folder)
    load_rank_events(run)
    with _recording_errors(run, "machine"):
        machines = node_log_files(folder)
        limit = min(MAX_MACHINE_RECORDS, 5 * MAX_MACHINE_RECORDS // max(1, len(machines)))
        for node, path in machines.items():
            with _recording_errors(run, path.name):
                for record in map(decode_record, _lines(path, MAX_BYTES // len(machines))):
                    if isinstance(record, ClockOffset):
                        run.clock_offsets[record.node] = record
                    elif record is not None and len(records := run.machines.setdefault(node, [])) < limit:
                        records.append(record)
    _read_starts(run)
    if not run.ranks and not run.starts and not run.settings:
        why = f": {'; '.join(run.unreadable_parts)}" if run.unreadable_parts else ""
        raise UsageError(f"{folder} contains no readable part of a run{why}")
    _align_clocks(run)
    return run


def load_rank_events(run: RunData) -> None:
    with _recording_errors(run, "events"):
        files = event_files(run.folder)
        for rank in [*files][:MAX_RANKS]:
            run.ranks[rank] = log = RankEvents(rank, min(MAX_EVENTS, MAX_TRACED // len(files)))
            with _recording_errors(run, files[rank].name):
                for line in _lines(files[rank], MAX_BYTES // len(files)):
                    if (event := decode_event(line)) is not None:
                        log.add_event(event)


def _lines(path: Path, max_bytes: int) -> Iterator[bytes]:
    """The lines in the first `max_bytes` of a file, without those that are too long to be from paceline."""
    for line in read_lines(path):
        max_bytes -= len(line)
        if max_bytes < 0:
            raise UsageError("file truncated: larger than the display limit")
        if len(line) < MAX_LINE_BYTES or line.startswith(ANATOMY):
            yield line


def _read_starts(run: RunData) -> None:
    with _recording_errors(run, "attempts"):
        for number, attempt in attempt_dirs(run.folder).items():
            run.starts += 1
            run.notices += read_notices(attempt)
            for record in failure_file_names(attempt):
                with _recording_errors(run, f"attempt-{number}/{record}"):
                    run.failures.append(read_json(attempt / record, Failure))
            for name in list_folders(attempt):
                is_diagnosis = name.startswith(("diagnosis-", "verdict-")) and "-live" not in name
                if is_diagnosis and len(run.diagnoses) < MAX_DIAGNOSES:
                    with _recording_errors(run, f"attempt-{number}/{name}"):
                        diagnosis = read_diagnosis(attempt / name)
                        run.diagnoses.append(msgspec.structs.replace(diagnosis, evidence=()))


def _align_clocks(run: RunData) -> None:
    """Convert all times to node 0's clock, for hosts with a known clock offset."""
    ahead = {remove_control_characters(run.machines[node][-1].host): clock.ahead_seconds
             for node, clock in run.clock_offsets.items() if run.machines.get(node)}  # fmt: skip
    for log in run.ranks.values():
        offset = ahead.get(remove_control_characters(log.start_events[-1].host), 0.0) if log.start_events else 0.0
        if offset:
            log.steps.ended = array("d", (at - offset for at in log.steps.ended))
            log.traced = {n: msgspec.structs.replace(t, unix_time=t.unix_time - offset) for n, t in log.traced.items()}


@contextmanager
def _recording_errors(run: RunData, part: str) -> Generator[None]:
    try:
        yield
    except FileNotFoundError:
        pass
    except (OSError, PacelineError, ValueError) as error:
        if len(run.unreadable_parts) < MAX_MISSING:
            run.unreadable_parts.append(f"{part}: {remove_control_characters(str(error))[:MAX_CHARS]}")


def _flat(table: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat.update(value if isinstance(value, dict) else {name: value})
    return flat


def pick_evenly(rows: Sequence[int], limit: int) -> Sequence[int]:
    if len(rows) <= limit:
        return rows
    return [rows[round(index * (len(rows) - 1) / (limit - 1))] for index in range(limit)]
