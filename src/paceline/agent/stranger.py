"""A process that is no child of ours, with what an agent needs of its own: how it ended, a signal, a wait."""

import os
import select
import signal
import time
from contextlib import suppress


class Stranger:
    """A process of ours that is no child of ours."""

    def __init__(self, pid: int) -> None:
        """Raises OSError when there is none."""
        self.pid, self.pidfd = pid, os.pidfd_open(pid)
        self.code: int | None = None
        self.ended_seconds = 0.0

    def fileno(self) -> int:
        """What can be read when it has ended."""
        return self.pidfd

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self.code

    def end(self, code: int | None) -> None:
        """Note how it has ended; None: without a word, and the kernel does not say: then it was killed."""
        self.code = -signal.SIGKILL if code is None else code
        self.ended_seconds = time.monotonic()

    def send_signal(self, number: int) -> None:
        """Nothing happens to one that has ended, or has said that it does: its exit code is its own."""
        with suppress(OSError):
            if self.code is None:
                signal.pidfd_send_signal(self.pidfd, number)

    def wait(self, timeout: float) -> int | None:
        """Until it ends, or the time is over."""
        select.select([self.pidfd], [], [], timeout)
        return self.code
