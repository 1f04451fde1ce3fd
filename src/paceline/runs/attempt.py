"""Files of one start of a run, attempt-N: its end, its hosts, its agent's findings, and the times of the lines of its
logs (no torch here).

rank-<r>.times has records of 16 bytes: the size of rank-<r>.log (little-endian, unsigned) and a time (Unix time,
double). The agent looks once a second and writes one if the log has grown. The log has only the worker's output.
"""

import math
import os
import struct
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from paceline.runs import writing
from paceline.runs.console import clean
from paceline.runs.owners import opened
from paceline.runs.reading import decode_if_readable, read_lines

NODES, NOTICES = "nodes.json", "notices.jsonl"
MAX_NOTICES, MAX_NOTICE_CHARS, MAX_NODE_CHARS = 100, 500, 300
RECORD = struct.Struct("<Qd")
LOOK_SECONDS = 1.0
PAGE = 4096  # records of times that are read at a time


class Ended(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a start, from node 0's agent: its exit code, and one line about its failure."""

    exit: Annotated[int, msgspec.Meta(ge=-255, le=255)]
    words: str = ""


def write_ended(attempt_dir: Path, ended: Ended) -> None:
    """Write attempt-N/ended.json, completely or not at all, for tasks and scripts. A full disk raises no error."""
    with suppress(OSError):
        writing.replace(attempt_dir / "ended.json", msgspec.json.encode(ended))


def read_ended(attempt_dir: Path) -> Ended | None:
    """The end of a start; None if its agent still runs, or was killed."""
    return decode_if_readable(attempt_dir / "ended.json", Ended)


NodeState = Literal["in", "waits", "lost", "left", "refused"]


class NodeNow(msgspec.Struct, frozen=True):
    """A node, and in `words` the reason if it has left."""

    node: int
    host: str
    state: NodeState
    words: str = ""


class NodesNow(msgspec.Struct, frozen=True):
    """All nodes except 0 of a run that was started with --nodes LEAST:MOST."""

    least: int
    most: int
    all: tuple[NodeNow, ...]

    @property
    def line(self) -> str:
        """All in one line."""
        inside = [one.host for one in self.all if one.state == "in"]
        asked = f"--nodes {self.least}:{self.most}"
        groups = [f"{len(inside)} in ({asked}): {', '.join(inside)}"]
        for state in ("waits", "lost", "left", "refused"):
            found = [one for one in self.all if one.state == state]
            told = ", ".join(one.host + (f" ({one.words[:MAX_NODE_CHARS]})" if one.words else "") for one in found)
            groups += [f"{state}: {told}"] if told else []
        return clean("; ".join(groups))


def write_nodes(attempt_dir: Path, nodes: NodesNow) -> None:
    """Write nodes.json. A full disk raises no error."""
    with suppress(OSError):
        writing.replace(attempt_dir / NODES, msgspec.json.encode(nodes))


def read_nodes(attempt_dir: Path) -> NodesNow | None:
    """The nodes when they last changed; None for a run with a fixed number of nodes."""
    return decode_if_readable(attempt_dir / NODES, NodesNow)


class Noted(msgspec.Struct, frozen=True, omit_defaults=True):
    """A finding of the head's agent in a script: a line of notices.jsonl."""

    unix_time: float
    words: str
    step: int = 0
    kind: str = ""
    """its type: "diverged", "swallowed", ...; empty if it is not about the script"""


def note(attempt_dir: Path, noted: Noted) -> None:
    """Append a finding. A full disk raises no error."""
    with suppress(OSError), os.fdopen(writing.keep(attempt_dir / NOTICES, append=True), "ab", 0) as file:
        file.write(msgspec.json.encode(noted) + b"\n")


def notices(attempt_dir: Path) -> Iterator[Noted]:
    """The findings, the oldest first; at most a hundred."""
    with suppress(OSError):
        for _, line in zip(range(MAX_NOTICES), read_lines(attempt_dir / NOTICES), strict=False):
            with suppress(msgspec.MsgspecError):
                found = msgspec.json.decode(line, type=Noted)
                yield replace(found, words=clean(found.words)[:MAX_NOTICE_CHARS])


def times_path(log: Path) -> Path:
    """The file with the times of a log."""
    return log.with_suffix(".times")


class TimesWriter:
    """Records the growth of a log. A full disk raises no error; the times are then missing."""

    def __init__(self, log: Path) -> None:
        self._log, self._size, self._due_seconds, self._descriptor = log, 0, 0.0, -1
        with suppress(OSError):
            self._descriptor = writing.keep(times_path(log))

    def look(self, *, last: bool = False) -> None:
        """Record the growth since the last look; at most once a second, except the `last` time."""
        now = time.monotonic()
        if self._descriptor < 0 or (now < self._due_seconds and not last):
            return
        self._due_seconds = now + LOOK_SECONDS
        with suppress(OSError):
            size = self._log.stat().st_size
            if size > self._size:
                end = os.fstat(self._descriptor).st_size // RECORD.size * RECORD.size  # a torn record is overwritten
                os.pwrite(self._descriptor, RECORD.pack(size, time.time()), end)
                self._size = size

    def close(self) -> None:
        """Close the file of times."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class LogTimes:
    """The time of each part of a log, to the second. The file of times is read a page at a time.

    Raises:
        FileNotFoundError: there is none: an older paceline wrote the log.
        Unreadable: it cannot be read.
    """

    def __init__(self, log: Path) -> None:
        self._path, self._first, self._page = times_path(log), -1, list[tuple[int, float]]()
        with opened(self._path) as it:
            self._count = it.found.st_size // RECORD.size
        with opened(log) as it:
            self._last_seconds = it.found.st_mtime  # of the lines after the agent's last look

    def at(self, offset: int) -> float:
        """The time (Unix time) by which the byte at `offset` was written, at most a second late."""
        page = self._page
        if not page or not page[0][0] <= offset < page[-1][0]:
            index = bisect_right(range(self._count), offset, key=lambda i: self._record(i)[0])
            return self._record(index)[1] if index < self._count else self._last_seconds
        return page[bisect_right(page, offset, key=lambda record: record[0])][1]

    def offset(self, since: float) -> int:
        """The offset from which the log was written at `since` or later."""
        if self._last_seconds < since:
            return 2**63 - 1
        index = bisect_left(range(self._count), since, key=lambda i: self._record(i)[1])
        return self._record(index - 1)[0] if index else 0

    def _record(self, index: int) -> tuple[int, float]:
        if not 0 <= index - self._first < len(self._page) or self._first < 0:
            self._first = index // PAGE * PAGE
            with opened(self._path) as it:
                data = os.pread(it.descriptor, PAGE * RECORD.size, self._first * RECORD.size)
            whole = data[: len(data) // RECORD.size * RECORD.size]
            self._page = [(size, _sane(seconds)) for size, seconds in RECORD.iter_unpack(whole)]
        found = index - self._first
        return self._page[found] if found < len(self._page) else (2**63 - 1, self._last_seconds)  # it was cut off


def _sane(seconds: float) -> float:
    """A valid time; 0 for other numbers, which a folder may have."""
    return seconds if math.isfinite(seconds) and 0 <= seconds < 2e10 else 0.0
