"""Reads logs and run folders for `analysis`: line by line, whatever their size (no torch here)."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.disk.owners import opened
from paceline.disk.reading import folders
from paceline.observe.events import Evaluated, Event, RolledBack, Skipped, Started, Step, event_files, read_events
from paceline.observe.folder import attempt_number
from paceline.observe.log_times import LogTimes
from paceline.observe.terminal import clean
from paceline.view.analysis import Analyzer
from paceline.view.log_formats import Reading, read_line
from paceline.view.rank_logs import rank_logs

BLOCK_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 14  # of a line no more is looked at
LINE_END = re.compile(rb"[\r\n]")


class UnknownFormat(Exception):  # noqa: N818 - says what was met
    """No line of a log was of a known kind; the first one that says anything, and its number."""

    def __init__(self, lines: int, number: int, line: str) -> None:
        super().__init__(line)
        self.lines, self.number, self.line = lines, number, line


def add_log(analyzer: Analyzer, path: Path, *, prefix: str = "", rank: str = "", only_trouble: bool = False) -> None:
    """Add all lines of a log; `prefix` is put before their numbers, `rank` is whose they are if they do not say it.

    Raises:
        OSError: it cannot be read.
        UnknownFormat: nothing is known, in this log and what was added before.
    """
    times: LogTimes | None = None
    with suppress(OSError):
        times = LogTimes(path)
    first = (0, "")
    number = 0
    for number, end, text in _lines(path):
        if not first[0] and text.strip():
            first = (number, text)
        reading = read_line(text)
        reading.rank = rank or reading.rank
        if reading.unix_time is None and times is not None:
            reading.unix_time = times.at(end)
        analyzer.add(f"{prefix}{number}", reading, only_trouble=only_trouble)
    if not analyzer.knows and not only_trouble:
        raise UnknownFormat(number, *first)


def _lines(path: Path) -> Iterator[tuple[int, int, str]]:
    """Number, last byte and text of each line; each state of a bar is one, with its line's number."""
    number, at, rest, cut = 1, 0, b"", False
    with opened(path) as it:
        while data := os.pread(it.descriptor, BLOCK_BYTES, at):
            start = 0
            for found in LINE_END.finditer(data):
                if not cut and (line := rest + data[start : found.start()]):
                    yield number, at + found.start(), _text(line)
                rest, cut, start = b"", False, found.end()
                number += found[0] == b"\n"
            if not cut:
                rest += data[start:]
                if len(rest) > MAX_LINE_BYTES:  # its end is not looked at
                    yield number, at + len(data) - 1, _text(rest)
                    rest, cut = b"", True
            at += len(data)
    if rest:
        yield number, at - 1, _text(rest)


def _text(line: bytes) -> str:
    return clean(line[:MAX_LINE_BYTES].decode(errors="replace"))


def add_run(analyzer: Analyzer, run_dir: Path) -> None:
    """Add a run: its events, and what went wrong by its logs; of a run without events, what the logs say.

    Raises:
        OSError: it cannot be read.
        UnknownFormat: there are no events, and nothing in its logs is known.
    """
    events = event_files(run_dir)
    first = next(iter(events), None)
    for rank, path in events.items():
        for event in read_events(path):
            if rank == first or isinstance(event, Step):  # the others say the same
                _add_event(analyzer, str(rank), event)
    unknown = add_logs(analyzer, run_dir, only_trouble=bool(events))
    if not analyzer.knows:
        raise unknown or UnknownFormat(0, 0, "")


def add_logs(
    analyzer: Analyzer, run_dir: Path, *, only_trouble: bool, most_bytes: int | None = None
) -> UnknownFormat | None:
    """Add what a run's ranks have printed in all its starts; what is unknown in it, if nothing is known.

    Args:
        analyzer: to be fed.
        run_dir: the run's folder.
        only_trouble: leave out what its events say better.
        most_bytes: leave out logs that are larger together.

    Raises:
        OSError: it cannot be read.
    """
    unknown: UnknownFormat | None = None
    for attempt in sorted((run_dir / name for name in folders(run_dir)), key=attempt_number):
        for rank, path in rank_logs(attempt).items() if attempt_number(attempt) else ():
            prefix = f"{attempt.name}/{path.name}:"
            if most_bytes is not None:
                size = path.lstat().st_size
                if size > most_bytes:
                    analyzer.note("not read", f"{prefix}1", str(rank), f"{size:,} bytes are too many for a page")
                    continue
                most_bytes -= size
            try:
                add_log(analyzer, path, prefix=prefix, rank=str(rank), only_trouble=only_trouble)
            except UnknownFormat as error:
                unknown = unknown or error
    return unknown


def _add_event(analyzer: Analyzer, rank: str, event: Event) -> None:
    match event:
        case Step():
            loss = None if event.skipped else event.loss  # a loss that is not finite is written as 0
            reading = Reading("events", rank, event.unix_time, float(event.epoch), float(event.step), loss=loss)
            reading.samples_per_second = event.samples / event.seconds if event.seconds > 0 else None
            analyzer.add(f"step {event.step}", reading)
        case Evaluated():
            kept = {name: event.metrics[name] for name in ("loss", "accuracy") if name in event.metrics}
            analyzer.add(f"step {event.step}", Reading("events", rank, held_out=kept))
        case Started() if (event.attempt, event.generation) != (1, 0):
            words = f"start {event.attempt}, generation {event.generation}: goes on from step {event.start_step}"
            analyzer.note("restart", f"step {event.start_step}", rank, words)
        case Skipped():
            analyzer.note("not finite", f"step {event.step}", rank, event.reason)
        case RolledBack():
            analyzer.note("restart", f"step {event.step}", rank, f"rolled back to step {event.to}")
        case _:
            pass
