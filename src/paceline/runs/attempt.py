"""Files of one start of a run, attempt-N: how it ended, which hosts are in it, what its agent has found, and when the
lines of its logs were written (no torch here).

rank-<r>.times beside rank-<r>.log has records of 16 bytes: how many bytes the log had (little-endian, unsigned), and
when that was seen (Unix time, double). The agent looks once a second and writes one where the log has grown; the log
itself stays what the worker has printed.
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
    """How a start ended, by the word of node 0's agent: its exit code, and in a line what it failed of."""

    exit: Annotated[int, msgspec.Meta(ge=-255, le=255)]
    words: str = ""


def write_ended(attempt_dir: Path, ended: Ended) -> None:
    """Write attempt-N/ended.json: how the whole start ended, on all nodes, also of any script.

    Whole or not at all; a full disk does not change how a run ends.
    """
    with suppress(OSError):
        writing.replace(attempt_dir / "ended.json", msgspec.json.encode(ended))


def read_ended(attempt_dir: Path) -> Ended | None:
    """What `write_ended` wrote; None where the agent has written none: it still runs, or was killed."""
    return decode_if_readable(attempt_dir / "ended.json", Ended)


NodeState = Literal["in", "waits", "lost", "left", "refused"]


class NodeNow(msgspec.Struct, frozen=True):
    """One of them. `words` say why it is gone."""

    node: int
    host: str
    state: NodeState
    words: str = ""


class NodesNow(msgspec.Struct, frozen=True):
    """All of a run that was started with --nodes LEAST:MOST, other than 0."""

    least: int
    most: int
    all: tuple[NodeNow, ...]

    @property
    def line(self) -> str:
        """For people."""
        inside = [one.host for one in self.all if one.state == "in"]
        asked = f"--nodes {self.least}:{self.most}"
        groups = [f"{len(inside)} in ({asked}): {', '.join(inside)}"]
        for state in ("waits", "lost", "left", "refused"):
            found = [one for one in self.all if one.state == state]
            told = ", ".join(one.host + (f" ({one.words[:MAX_NODE_CHARS]})" if one.words else "") for one in found)
            groups += [f"{state}: {told}"] if told else []
        return clean("; ".join(groups))


def write_nodes(attempt_dir: Path, nodes: NodesNow) -> None:
    """Write it down, where the disk allows."""
    with suppress(OSError):
        writing.replace(attempt_dir / NODES, msgspec.json.encode(nodes))


def read_nodes(attempt_dir: Path) -> NodesNow | None:
    """What was last written; None for a run whose hosts do not come and go."""
    return decode_if_readable(attempt_dir / NODES, NodesNow)


class Noted(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line."""

    unix_time: float
    words: str
    step: int = 0
    kind: str = ""
    """what was found: "diverged", "swallowed", ...; empty for what says nothing of the script"""


def note(attempt_dir: Path, noted: Noted) -> None:
    """Add one; a full disk does not keep a run from going on."""
    with suppress(OSError), os.fdopen(writing.keep(attempt_dir / NOTICES, append=True), "ab", 0) as file:
        file.write(msgspec.json.encode(noted) + b"\n")


def notices(attempt_dir: Path) -> Iterator[Noted]:
    """What was found, the oldest first; at most a hundred."""
    with suppress(OSError):
        for _, line in zip(range(MAX_NOTICES), read_lines(attempt_dir / NOTICES), strict=False):
            with suppress(msgspec.MsgspecError):
                found = msgspec.json.decode(line, type=Noted)
                yield replace(found, words=clean(found.words)[:MAX_NOTICE_CHARS])


def times_path(log: Path) -> Path:
    """Where the times of this log are."""
    return log.with_suffix(".times")


class TimesWriter:
    """Notes how a log grows. A disk that is full costs the times, and nothing else."""

    def __init__(self, log: Path) -> None:
        self._log, self._size, self._due_seconds, self._descriptor = log, 0, 0.0, -1
        with suppress(OSError):
            self._descriptor = writing.keep(times_path(log))

    def look(self, *, last: bool = False) -> None:
        """Note what has come since; at most once a second, but for the `last` time."""
        now = time.monotonic()
        if self._descriptor < 0 or (now < self._due_seconds and not last):
            return
        self._due_seconds = now + LOOK_SECONDS
        with suppress(OSError):
            size = self._log.stat().st_size
            if size > self._size:
                end = os.fstat(self._descriptor).st_size // RECORD.size * RECORD.size  # what was torn is written over
                os.pwrite(self._descriptor, RECORD.pack(size, time.time()), end)
                self._size = size

    def close(self) -> None:
        """No more is noted."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class LogTimes:
    """When each part of a log was written, to the second; the file of times is read a page at a time.

    Raises:
        FileNotFoundError: it has none; an older paceline has written it.
        Unreadable: in words, why it cannot be read.
    """

    def __init__(self, log: Path) -> None:
        self._path, self._first, self._page = times_path(log), -1, list[tuple[int, float]]()
        with opened(self._path) as it:
            self._count = it.found.st_size // RECORD.size
        with opened(log) as it:
            self._last_seconds = it.found.st_mtime  # of what has come since the agent looked last

    def at(self, offset: int) -> float:
        """When the byte at `offset` was written, as Unix time: within a second before."""
        page = self._page
        if not page or not page[0][0] <= offset < page[-1][0]:
            index = bisect_right(range(self._count), offset, key=lambda i: self._record(i)[0])
            return self._record(index)[1] if index < self._count else self._last_seconds
        return page[bisect_right(page, offset, key=lambda record: record[0])][1]

    def offset(self, since: float) -> int:
        """From where on the log was written at `since` or later."""
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
    """A time that can be shown; whoever writes a folder can give it any."""
    return seconds if math.isfinite(seconds) and 0 <= seconds < 2e10 else 0.0
