"""Loss and throughput of a training, by the lines of any log or by the events of a run (no torch here)."""

import math
import os
import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.disk.owners import opened
from paceline.disk.reading import folders
from paceline.observe.events import Evaluated, Step, event_files, read_events
from paceline.observe.folder import attempt_number
from paceline.observe.log_times import LogTimes
from paceline.observe.terminal import clean
from paceline.view.log_lines import Reading, read_line
from paceline.view.rank_logs import rank_logs

BLOCK_BYTES, MAX_LINE_BYTES = 1 << 18, 1 << 14  # of a line no more is read
LINE_END = re.compile(rb"[\r\n]")
MOST_RANKS = 4096
WINDOW_SECONDS = 5.0  # of times to the second: a rate over less would be noise


class Analysis(msgspec.Struct, frozen=True):
    """What `paceline analyze --json` prints: each value in the order of the lines."""

    name: str
    lines: int
    formats: dict[str, int]  # kind of line -> how many
    ranks: list[str]
    values: dict[str, list[float]]
    """loss, test loss and test accuracy of the first rank that has them; samples/s and steps/s of all ranks"""
    not_finite: dict[str, int]  # rank -> losses that are NaN or infinite


class Analyzer:
    """Takes lines one by one."""

    def __init__(self, name: str) -> None:
        self._name, self._lines, self.first = name, 0, ""
        self._formats: dict[str, int] = {}
        self._ranks: dict[str, None] = {}
        self._not_finite: dict[str, int] = {}
        self._values: dict[str, array[float]] = {}
        self._owners: dict[str, str] = {}  # name of a value -> the rank that it is of
        self._anchors: dict[str, tuple[float, tuple[int, int]]] = {}  # rank -> time, and samples then

    def add(self, reading: Reading) -> None:
        """One more line."""
        self._lines += 1
        if reading.rank and len(self._ranks) < MOST_RANKS:
            self._ranks[reading.rank] = None
        if reading.format:
            self._formats[reading.format] = self._formats.get(reading.format, 0) + 1
        if not math.isfinite(reading.values.get("loss", 0.0)):
            self._not_finite[reading.rank] = self._not_finite.get(reading.rank, 0) + 1
        for name, value in reading.values.items():
            if self._owners.setdefault(name, reading.rank) == reading.rank or name.endswith("/s"):
                self._values.setdefault(name, array("d")).append(value)
        if reading.unix_time is not None and reading.samples and (rate := self._counted(reading, *reading.samples)):
            self._values.setdefault("samples/s (counted)", array("d")).append(rate)

    def _counted(self, reading: Reading, epoch: int, done: int) -> float | None:
        now = reading.unix_time or 0.0
        before, (same, start) = self._anchors.setdefault(reading.rank, (now, (epoch, done)))
        onward = epoch == same and done >= start
        if onward and 0 <= now - before < WINDOW_SECONDS:
            return None
        self._anchors[reading.rank] = now, (epoch, done)
        return (done - start) / (now - before) if onward and done > start and now > before else None

    def result(self) -> Analysis:
        """What all lines add up to."""
        values = {name: values.tolist() for name, values in self._values.items()}
        ranks = sorted(self._ranks, key=lambda rank: (len(rank), rank))
        return Analysis(self._name, self._lines, self._formats, ranks, values, self._not_finite)

    def add_log(self, path: Path, *, rank: str = "") -> None:
        """Add all lines of a log; OSError if it cannot be read."""
        times: LogTimes | None = None
        with suppress(OSError):
            times = LogTimes(path)
        for end, text in _lines(path):
            self.first = self.first or text[:120].strip()
            reading = read_line(text)
            reading.rank = rank or reading.rank
            if reading.unix_time is None and times is not None:
                reading.unix_time = times.at(end)
            self.add(reading)

    def add_run(self, run_dir: Path, *, most_bytes: float = math.inf) -> None:
        """Add a run: its events, or else its logs if they have at most so many bytes; OSError if it cannot be read."""
        events = event_files(run_dir)
        for rank, path in events.items():
            for event in read_events(path):
                if isinstance(event, Step):
                    loss = math.nan if event.skipped else event.loss  # a loss that is not finite is written as 0
                    rate = {"samples/s": event.samples / event.seconds} if event.seconds > 0 else {}
                    self.add(Reading("events", str(rank), values={"loss": loss, **rate}))
                elif isinstance(event, Evaluated):
                    kept = {
                        f"test {name}": event.metrics[name] for name in ("loss", "accuracy") if name in event.metrics
                    }
                    self.add(Reading("events", str(rank), values=kept))
        for attempt in sorted((run_dir / name for name in folders(run_dir)), key=attempt_number) if not events else ():
            for rank, path in rank_logs(attempt).items() if attempt_number(attempt) else ():
                if (most_bytes := most_bytes - path.lstat().st_size) >= 0:
                    self.add_log(path, rank=str(rank))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Last byte and text of each line; each state of a bar is one."""
    at, rest = 0, b""
    with opened(path) as it:
        while block := os.pread(it.descriptor, BLOCK_BYTES, at):
            *lines, rest = LINE_END.split(rest + block)
            at += len(block)
            end = at - len(rest) - sum(len(line) + 1 for line in lines)
            for line in lines:
                end += len(line) + 1
                yield end - 1, _text(line)
            rest = rest[:MAX_LINE_BYTES]
    if rest:
        yield at - 1, _text(rest)


def _text(line: bytes) -> str:
    return clean(line[:MAX_LINE_BYTES].decode(errors="replace"))
