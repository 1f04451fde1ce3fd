"""Where is a process that does not answer? Python's faulthandler writes its stacks on SIGNAL, into its box.

That needs no interpreter lock: a regular expression that runs for ever, or a C extension that never returns, is seen
with the line of Python that called it.
"""

from __future__ import annotations

import faulthandler
import os
from typing import BinaryIO

from paceline.contract.box import SIGNAL, SIGNAL_SAFE, WATCHED, Box


class NativeStacks:
    """The handler, and the file that it writes to: the box once more, opened so that text is appended to its end."""

    def __init__(self, box: Box) -> None:
        """Raises OSError where /proc is not to be had."""
        path = f"/proc/self/fd/{box.descriptor}"
        self._file: BinaryIO | None = open(path, "ab", buffering=0)  # noqa: PTH123, SIM115 - as long as the process
        self._inode = os.fstat(self._file.fileno()).st_ino
        # Only the thread that the kernel gives the signal to, the main one if it can: the stacks of threads that run,
        # begin and end meanwhile cannot be read without the lock (measured: the process died of it, now and then).
        faulthandler.register(SIGNAL, file=self._file, all_threads=False, chain=False)

    def ready(self) -> int:
        """SIGNAL_SAFE while the file is still the box: a program that closes all descriptors may have another there."""
        if self._file is None:
            return WATCHED
        try:
            if os.fstat(self._file.fileno()).st_ino == self._inode:
                return SIGNAL_SAFE
        except OSError:
            pass
        faulthandler.unregister(SIGNAL)
        self._file = None
        return WATCHED
