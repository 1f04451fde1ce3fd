"""What has been written to a text file, and since the last look: whole lines, and nothing that steers a terminal.

Of a line that was drawn over (a progress bar's), only what it shows in the end.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.runs.console import clean, last_drawn
from paceline.runs.owners import opened

MAX_BYTES = 1 << 20  # of one look
BLOCK_BYTES = 1 << 16
MAX_LAST_BYTES = 4 << 20  # how far back the last lines are looked for
MAX_LINE_BYTES = 1 << 16  # a longer line appears in pieces
BAR_SECONDS = 10.0  # between two states of a bar that has no end yet


class Tail:
    """A file that grows, or does not exist yet; what was read is not read again."""

    def __init__(self, path: Path, offset_bytes: int = 0) -> None:
        self.path = path
        self._offset, self._rest = offset_bytes, b""
        self._bar_seconds = time.monotonic() + BAR_SECONDS

    def read(self, *, to_the_end: bool = False) -> str:
        """New text, up to the last whole line; `to_the_end`: all there is."""
        text = self._read()
        while to_the_end and (more := self._read()):
            text += more
        if to_the_end and self._rest:
            text += _shown(self._rest) + "\n"
            self._rest = b""
        return text

    def _read(self) -> str:
        try:
            with opened(self.path) as it:
                data = os.pread(it.descriptor, MAX_BYTES, self._offset)
        except OSError:  # not there yet
            return ""
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        bar_due = b"\r" in self._rest and time.monotonic() >= self._bar_seconds
        if bar_due or len(self._rest) > MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
            self._bar_seconds = time.monotonic() + BAR_SECONDS
        return "".join(f"{_shown(line)}\n" for line in lines)


class Line(NamedTuple):
    """A line of a file, and where its last byte is."""

    end: int
    text: str


def lines_of(path: Path, start: int = 0, end: int | None = None) -> Iterator[Line]:
    """The lines of a file as it is now, from byte `start` on, up to `end`; a long one in pieces.

    Raises:
        OSError: if it cannot be read.
    """
    rest, at = b"", start
    with opened(path) as it:
        end = it.found.st_size if end is None else end
        while at < end and (data := os.pread(it.descriptor, min(BLOCK_BYTES, end - at), at)):
            here = at - len(rest)
            at += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                here += len(line) + 1
                yield Line(here - 1, _shown(line))
            if len(rest) > MAX_LINE_BYTES:  # of a bar without end its last state may still come
                if b"\r" not in rest:
                    yield Line(at - 1, _shown(rest))
                rest = rest[rest.rfind(b"\r") + 1 :] if b"\r" in rest[:-1] else b""
    if rest:
        yield Line(at - 1, _shown(rest))


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace")
    return clean(last_drawn(text) if "\r" in text else text)


def start_of_last(path: Path, count: int) -> tuple[int, int]:
    """Where the last `count` lines of a file begin, as far as they lie in its last 4 MiB, and how many bytes it has.

    Raises:
        OSError: if it cannot be read.
    """
    with opened(path) as it:
        end = it.found.st_size
        most, size = min(end, MAX_LAST_BYTES), min(end, BLOCK_BYTES)
        while True:  # from the end: a log may be larger than memory
            data = os.pread(it.descriptor, size, end - size)
            cut = len(data) if data.endswith(b"\n") or not data else len(data) + 1
            for _ in range(count):
                cut = data.rfind(b"\n", 0, max(0, cut - 1)) + 1
                if not cut:
                    break
            if cut or size == most:
                return end - size + min(cut, len(data)), end
            size = min(most, 4 * size)
