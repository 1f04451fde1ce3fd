"""A file of JSON lines that stays small however long a run is: the older its records, the fewer of them are kept.

When the file has reached its limit, every second record of its older half is dropped; the newer half stays whole. So
after days the last minutes are there second by second, and the first hours every few minutes.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.disk import writing
from paceline.disk.reading import read_lines
from paceline.observe.terminal import say

LIMIT_BYTES = 1 << 20


class BoundedWriter:
    """Appends records to a file, from any thread. What goes wrong is said once, and ends nothing but the writing."""

    def __init__(self, path: Path, *, limit_bytes: int = LIMIT_BYTES, warn: Callable[[str], object] = say) -> None:
        self._path, self._limit_bytes, self._warn = path, limit_bytes, warn
        self._encode = msgspec.json.Encoder().encode
        self._lock = threading.Lock()
        self._descriptor = -1
        self._size_bytes = 0
        self.failed = False
        """whether it has given up"""

    def write(self, record: msgspec.Struct) -> None:
        """Append `record`; nothing is written any more once that has failed."""
        with self._lock:
            if self.failed:
                return
            try:
                self._append(self._encode(record) + b"\n")
            except Exception as error:  # a full disk, a folder that is gone: never the end of a training
                self.failed = True
                self._let_go()
                self._warn(f"warning: {self._path.name} is not written any more: {error}")

    def close(self) -> None:
        """Let go of the file; a later record opens it again."""
        with self._lock:
            self._let_go()

    def _append(self, line: bytes) -> None:
        if self._descriptor < 0:
            self._open()
        if self._size_bytes + len(line) > self._limit_bytes:
            self._thin()
        self._size_bytes += os.write(self._descriptor, line)  # whole, or the disk is full: readers skip a torn one

    def _open(self) -> None:
        self._descriptor = writing.keep(self._path, append=True)
        self._size_bytes = os.fstat(self._descriptor).st_size
        if self._size_bytes and os.pread(self._descriptor, 1, self._size_bytes - 1) != b"\n":
            self._size_bytes += os.write(self._descriptor, b"\n")  # torn by a kill: it must not swallow the next one

    def _thin(self) -> None:
        lines = [line for line in read_lines(self._path) if line]
        half = len(lines) // 2
        kept = [*lines[:half:2], *lines[half:]]
        self._let_go()
        writing.replace(self._path, b"".join(line + b"\n" for line in kept))
        self._open()

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1
