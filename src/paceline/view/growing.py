"""A file that grows, line by line: what was read is not read again, and of a long one only the end is read at all."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from paceline.disk.owners import opened

FIRST_BYTES, LOOK_BYTES = 1 << 16, 1 << 20  # from its end at first, then at most at each look


class Growing:
    """The new lines of a file, at each look; at the first one those at its end."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor, self._offset, self._rest = path, -1, 0, b""

    def lines(self) -> Sequence[bytes]:
        """The whole lines that are new."""
        with suppress(OSError):
            if self._descriptor < 0:
                self._open()
            elif self._path.lstat().st_ino != os.fstat(self._descriptor).st_ino:  # thinned: old ones are put together
                self.close()
                self._open()
                self._offset, self._rest = os.fstat(self._descriptor).st_size, b""
            size = os.fstat(self._descriptor).st_size
            if size - self._offset > LOOK_BYTES:  # more than anybody reads in a second: what is old is left out
                self._offset, self._rest = size - LOOK_BYTES, b""
            data = os.pread(self._descriptor, LOOK_BYTES, self._offset)
            self._offset += len(data)
            *whole, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > LOOK_BYTES:
                self._rest = b""
            return whole
        return ()

    def _open(self) -> None:
        with opened(self._path) as it:
            self._descriptor, self._offset = os.dup(it.descriptor), max(0, it.found.st_size - FIRST_BYTES)

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
