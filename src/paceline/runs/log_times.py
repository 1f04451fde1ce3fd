"""When the lines of a rank's log were written: rank-<r>.times beside rank-<r>.log (no torch here).

Records of 16 bytes: how many bytes the log had (little-endian, unsigned), and when that was seen (Unix time, double).
The agent looks once a second and writes one where the log has grown; the log itself stays what the worker has printed.
"""

import math
import os
import struct
import time
from bisect import bisect_left, bisect_right
from contextlib import suppress
from pathlib import Path

from paceline.runs import writing
from paceline.runs.owners import opened

RECORD = struct.Struct("<Qd")
LOOK_SECONDS = 1.0
PAGE = 4096  # records that are read at a time


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
