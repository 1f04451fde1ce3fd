"""Writes a rank's events, and keeps their file small however long the run is."""

import os
from pathlib import Path
from typing import Self

import msgspec

from paceline.disk import writing
from paceline.disk.reading import read_lines
from paceline.observe.events import Event
from paceline.observe.folding import fold

LIMIT_BYTES = 32 << 20  # of a file: then the older half of its steps are put together, two by two


class EventWriter:
    """Appends records to one rank's file; each is whole on disk's side of the process before `write` returns."""

    def __init__(self, path: Path, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path, self._limit_bytes = path, limit_bytes
        self._encode = msgspec.json.Encoder().encode
        self._open()

    def _open(self) -> None:
        descriptor = writing.keep(self._path, append=True)
        self._file = os.fdopen(descriptor, "ab", buffering=0)  # unbuffered: a killed rank's last record counts most
        self._size_bytes = os.fstat(descriptor).st_size
        if self._size_bytes and os.pread(descriptor, 1, self._size_bytes - 1) != b"\n":
            self._size_bytes += self._file.write(b"\n")  # a line torn by a kill must not swallow its successor

    def write(self, event: Event) -> None:
        """Append `event`.

        Raises:
            OSError: if the disk is full, say.
        """
        line = self._encode(event) + b"\n"
        if self._size_bytes + len(line) > self._limit_bytes:
            self._thin()
        self._size_bytes += self._file.write(line)

    def _thin(self) -> None:
        """Put old steps together, so that the file stays small however long the run is."""
        try:
            lines = [line for line in read_lines(self._path) if line]
            half = len(lines) // 2
            kept = [*fold(lines[:half], lines[half:]), *lines[half:]]
            writing.replace(self._path, b"".join(line + b"\n" for line in kept), sync=True)
        except OSError:  # no room for a second one: it grows on
            self._limit_bytes *= 2
            return
        self._file.close()
        self._open()
        self._limit_bytes = max(self._limit_bytes, self._size_bytes + self._limit_bytes // 8)  # much that is no step

    def flush(self) -> None:
        """Return when all records are on the disk itself: a checkpoint must never be newer than they are.

        Raises:
            OSError: if the disk fails.
        """
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
