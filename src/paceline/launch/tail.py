"""What has been written to a text file since the last look? Whole lines, and nothing that steers a terminal."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.launch.verdict import clean

MAX_BYTES = 1 << 20  # of one look
MAX_LINE_BYTES = 1 << 16  # a longer line appears in pieces


class Tail:
    """A file that grows, or does not exist yet; what was read is not read again."""

    def __init__(self, path: Path, offset_bytes: int = 0) -> None:
        self.path = path
        self._offset, self._rest = offset_bytes, b""

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
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(MAX_BYTES)
        except OSError:  # not there yet
            return ""
        self._offset += len(data)
        lines, newline, self._rest = (self._rest + data).rpartition(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines, newline, self._rest = lines + newline + self._rest, b"\n", b""
        return clean((lines + newline).decode(errors="replace"))


def last_lines(path: Path, count: int) -> tuple[str, int]:
    """The last `count` lines of a file, and how many bytes it had.

    Raises:
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        size = min(end, MAX_BYTES)
        while True:  # from the end: a log may be larger than memory
            file.seek(end - size)
            lines = file.read(size).splitlines(keepends=True)
            if size == end or len(lines) > count:
                return clean(b"".join(lines[max(0, len(lines) - count) :]).decode(errors="replace")), end
            size = min(end, 2 * size)
