"""A whole run as its folder tells it: what each rank did in each step, what was found, saved, said. In bounded memory.

Whatever cannot be read is left out and noted: a page that lacks a part is better than none.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.disk.reading import decode, decode_toml, folders, read_lines
from paceline.errors import PacelineError, UsageError
from paceline.guard.report import VerdictRecord, read_verdict
from paceline.observe.events import Started, decode_event, event_files
from paceline.observe.folder import CONFIG, attempt_number, failure_records, launched_attempt
from paceline.observe.machine import ClockAhead, MachineUse, decode_record, machine_files
from paceline.observe.notices import Noted, notices
from paceline.observe.summary import Summary, read_summary
from paceline.observe.terminal import clean
from paceline.protocol.evidence import Failure
from paceline.view.rank_log import MOST_OF_A_KIND, RankLog

MOST_RANKS, MOST_CHARS = 4096, 2000
MOST_BYTES, MOST_TRACED = 1 << 30, 64 * MOST_OF_A_KIND  # of all ranks
MOST_LINE_BYTES, ANATOMY = 1 << 15, b'{"kind":"anatomy"'  # which may be longer
MOST_SAMPLES = 20_000  # of a machine
MOST_VERDICTS, MOST_NOTED = 100, 100


@dataclass
class WholeRun:
    """All of a run's folder."""

    folder: Path
    state: str = ""  # done, failed, running, ...: see `paceline status`
    words: str = ""  # more about it
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """as in config.toml, without the tables' names"""
    environment: dict[str, Any] = field(default_factory=dict[str, Any])
    summary: Summary | None = None
    ranks: dict[int, RankLog] = field(default_factory=dict[int, RankLog])
    machines: dict[int, list[MachineUse]] = field(default_factory=dict[int, list[MachineUse]])
    clocks: dict[int, ClockAhead] = field(default_factory=dict[int, ClockAhead])
    """by node: its newest reading"""
    failures: list[Failure] = field(default_factory=list[Failure])
    """of all starts, in the ranks' own words"""
    verdicts: list[VerdictRecord] = field(default_factory=list[VerdictRecord])
    noted: list[Noted] = field(default_factory=list[Noted])
    """what the agent has found while it ran, of all starts"""
    starts: int = 0
    missing: list[str] = field(default_factory=list[str])
    """what could not be read, and why"""

    @property
    def name(self) -> str:
        """For people."""
        return clean(self.folder.name)[:120] or str(self.folder)

    @property
    def first(self) -> RankLog | None:
        """The lowest rank that has written anything: what is global is taken from it."""
        return next((log for log in self.ranks.values() if log.started), None)

    @property
    def newest(self) -> Started | None:
        """The newest start."""
        return self.first.started[-1] if self.first else None

    @property
    def world_size(self) -> int:
        """Of the newest start; 0 where nobody says."""
        told = self.summary.world_size if self.summary else None
        return (self.newest.world_size if self.newest else told) or 0

    @property
    def hosts(self) -> dict[int, str]:
        """Where each rank of the newest start was."""
        size = self.world_size
        return {rank: log.started[-1].host for rank, log in self.ranks.items() if log.started and rank < size}

    @property
    def strategy(self) -> str:
        """Which one it was."""
        told = self.summary.strategy if self.summary else None
        return str(told or self.settings.get("strategy") or "")

    def latest(self) -> list[RankLog]:
        """The ranks that the newest start has, if all of them have written."""
        return [self.ranks[rank] for rank in range(self.world_size) if rank in self.ranks and self.ranks[rank].started]


def whole_run(folder: Path) -> WholeRun:
    """The run in `folder`.

    Raises:
        UsageError: nothing of a run can be read there.
    """
    run = WholeRun(folder)
    with _noting(run, CONFIG):
        run.settings = _flat(decode_toml(folder / CONFIG))
    with _noting(run, "environment.json"):
        run.environment = decode(folder / "environment.json", dict[str, Any])
    run.summary = read_summary(folder)
    with _noting(run, "events"):
        files = event_files(folder)
        for rank in [*files][:MOST_RANKS]:
            run.ranks[rank] = log = RankLog(rank, min(MOST_OF_A_KIND, MOST_TRACED // len(files)))
            with _noting(run, files[rank].name):
                for line in _lines(files[rank], MOST_BYTES // len(files)):
                    if (event := decode_event(line)) is not None:
                        log.take(event)
    with _noting(run, "machine"):
        machines = machine_files(folder)
        most = min(MOST_SAMPLES, 5 * MOST_SAMPLES // max(1, len(machines)))
        for node, path in machines.items():
            with _noting(run, path.name):
                for record in map(decode_record, _lines(path, MOST_BYTES // len(machines))):
                    if isinstance(record, ClockAhead):
                        run.clocks[record.node] = record
                    elif record is not None and len(found := run.machines.setdefault(node, [])) < most:
                        found.append(record)
    _read_starts(run)
    if not run.ranks and not run.starts and not run.settings:
        why = f": {'; '.join(run.missing)}" if run.missing else ""
        raise UsageError(f"{folder} holds nothing of a run that can be read{why}")
    _align(run)
    return run


def _lines(path: Path, most_bytes: int) -> Iterator[bytes]:
    """A file's lines, without those that are longer than any of ours; so many bytes of them."""
    for line in read_lines(path):
        most_bytes -= len(line)
        if most_bytes < 0:
            raise UsageError("file truncated: larger than the display limit")
        if len(line) < MOST_LINE_BYTES or line.startswith(ANATOMY):
            yield line


def _read_starts(run: WholeRun) -> None:
    with _noting(run, "attempts"):
        for name in sorted(folders(run.folder), key=lambda name: attempt_number(Path(name))):
            if not attempt_number(Path(name)):
                continue
            run.starts += 1
            attempt = launched_attempt(run.folder / name)
            run.noted += notices(attempt)
            for record in failure_records(attempt):
                with _noting(run, f"{name}/{record}"):
                    run.failures.append(decode(attempt / record, Failure))
            for inner in folders(attempt):
                found = inner.startswith("verdict-") and not inner.startswith("verdict-live")
                if found and len(run.verdicts) < MOST_VERDICTS:
                    with _noting(run, f"{name}/{inner}"):
                        told = read_verdict(attempt / inner)
                        run.verdicts.append(msgspec.structs.replace(told, evidence=()))


def _align(run: WholeRun) -> None:
    """Put all times on node 0's clock, where it is known by how much another host's is ahead."""
    ahead = {clean(run.machines[node][-1].host): clock.ahead_seconds
             for node, clock in run.clocks.items() if run.machines.get(node)}  # fmt: skip
    for log in run.ranks.values():
        by = ahead.get(clean(log.started[-1].host), 0.0) if log.started else 0.0
        if by:
            log.steps.ended = array("d", (at - by for at in log.steps.ended))
            log.traced = {
                step: msgspec.structs.replace(one, unix_time=one.unix_time - by) for step, one in log.traced.items()
            }


class _noting(suppress):  # noqa: N801 - as `suppress`
    """Inside, what cannot be read is noted, and left out."""

    def __init__(self, run: WholeRun, what: str) -> None:
        super().__init__(OSError, PacelineError, ValueError)
        self._run, self._what = run, what

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        known = isinstance(error, OSError | PacelineError | ValueError) and not isinstance(error, FileNotFoundError)
        if known and len(self._run.missing) < MOST_NOTED:
            self._run.missing.append(f"{self._what}: {clean(str(error))[:MOST_CHARS]}")
        return super().__exit__(kind, error, trace)


def _flat(table: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat.update(value if isinstance(value, dict) else {name: value})
    return flat


def thinned(rows: Sequence[int], most: int) -> Sequence[int]:
    """At most so many of `rows`, evenly, the first and the last among them."""
    if len(rows) <= most:
        return rows
    return [rows[round(index * (len(rows) - 1) / (most - 1))] for index in range(most)]
