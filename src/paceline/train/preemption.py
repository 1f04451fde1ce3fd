"""Notes that a run is asked to stop: by Ctrl-C, by Slurm before the time limit, by anyone who needs the machine.

A signal only sets a flag. The stop comes between two steps, when all ranks have agreed: inside a handler, a collective
or a file could be half done.
"""

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from paceline.rank.guard import Guard

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class StopRequest:
    """Whether this rank has been asked to stop, and by what."""

    def __init__(self, *, told: bool = False) -> None:
        """`told`: whether to answer the first request at once, in words."""
        self._told, self._pid = told, os.getpid()
        self.by: str | None = None

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Remember the first request; the second one ends the process at once.

        A process that was forked by ours has this handler, too. It saves nothing, and SIGTERM ends it: who forked it, a
        pool say, does so by this signal and waits for its end.
        """
        is_ours = os.getpid() == self._pid
        if self.by is None and (is_ours or number != signal.SIGTERM):
            self.by = signal.Signals(number).name
            if self._told and is_ours:  # no print: we may be in the middle of one
                os.write(2, f"paceline: {self.by}: saving after this step; again to stop now\n".encode())
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


@contextmanager
def noticing(*, told: bool = False) -> Generator[StopRequest]:
    """Inside, signals that ask to stop are noted instead of obeyed; ignored ones (nohup) stay ignored.

    Outside the main thread, where Python handles no signals, nothing is noted.
    """
    request = StopRequest(told=told)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    wanted = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before, box = {number: signal.signal(number, request.note) for number in wanted}, Guard.of_process().box
    box.note_stops(True)  # whatever the launcher is sent, an agent sends SIGTERM from now on
    try:
        yield request
    finally:
        box.note_stops(False)
        for number, handler in before.items():
            signal.signal(number, handler)
