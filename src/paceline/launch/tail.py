"""What has been written to a text file since the last look: whole lines, and nothing that steers a terminal."""

import os
from collections.abc import Iterator
from pathlib import Path

from paceline.disk.owners import opened
from paceline.observe.terminal import clean

MAX_BYTES = 1 << 20  # of one look
MAX_LAST_BYTES = 4 << 20  # how far back the last lines are looked for
MAX_ALL_BYTES = 64 << 20  # what is shown of a log at most
MAX_LINE_BYTES = 1 << 16  # a longer line appears in pieces


class Tail:
    """A file that grows, or does not exist yet; what was read is not read again."""

    def __init__(self, path: Path, offset_bytes: int = 0) -> None:
        self.path = path
        self._offset, self._rest = offset_bytes, b""

    @property
    def offset_bytes(self) -> int:
        """How far it was read."""
        return self._offset

    def read(self, *, to_the_end: bool = False) -> str:
        """New text, up to the last whole line; `to_the_end`: all there is."""
        text = self._read()
        while to_the_end and (more := self._read()):
            text += more
        if to_the_end and self._rest:
            text += clean(self._rest.decode(errors="replace")) + "\n"
            self._rest = b""
        return text

    def _read(self) -> str:
        try:
            with opened(self.path) as it:
                data = os.pread(it.descriptor, MAX_BYTES, self._offset)
        except OSError:  # not there yet
            return ""
        self._offset += len(data)
        lines, newline, self._rest = (self._rest + data).rpartition(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines, newline, self._rest = lines + newline + self._rest, b"\n", b""
        return clean((lines + newline).decode(errors="replace"))


def last_lines(path: Path, count: int) -> tuple[str, int]:
    """The last `count` lines of a file, as far as they lie in its last 4 MiB, and how many bytes it had.

    Raises:
        OSError: if it cannot be read.
    """
    with opened(path) as it:
        end = it.found.st_size
        most, size = min(end, MAX_LAST_BYTES), min(end, MAX_BYTES)
        while True:  # from the end: a log may be larger than memory
            lines = os.pread(it.descriptor, size, end - size).splitlines(keepends=True)
            if size == most or len(lines) > count:
                return clean(b"".join(lines[max(0, len(lines) - count) :]).decode(errors="replace")), end
            size = min(most, 2 * size)


def all_lines(path: Path) -> Iterator[str]:
    """All of a file as it is now, in pieces; of a very large one its last 64 MiB.

    Raises:
        OSError: if it cannot be read.
    """
    with opened(path) as it:
        end = it.found.st_size
    tail = Tail(path, max(0, end - MAX_ALL_BYTES))
    while tail.offset_bytes < end:
        before = tail.offset_bytes
        yield tail.read(to_the_end=False)
        if tail.offset_bytes == before:  # it was cut off meanwhile
            return
    yield tail.read(to_the_end=True)
