"""Handles signals that request a stop: Ctrl-C, Slurm before the time limit, or a user who needs the machine.

A signal only sets a flag. The run stops between two steps, after all ranks have agreed. A signal handler cannot stop it
itself, because it can interrupt a collective or the writing of a file.
"""

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from paceline.rank.guard import HangGuard

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class StopSignalHandler:
    def __init__(self, *, announce: bool = False) -> None:
        self._announce, self._pid = announce, os.getpid()
        self.by: str | None = None

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """Remember the first signal. The second signal ends the process immediately.

        A forked child process inherits this handler. SIGTERM ends such a child, which has nothing to save: for example,
        a multiprocessing pool ends its workers with SIGTERM and waits for them.
        """
        is_rank = os.getpid() == self._pid
        if self.by is None and (is_rank or number != signal.SIGTERM):
            self.by = signal.Signals(number).name
            if self._announce and is_rank:  # not print(): the signal may have interrupted one
                message = f"paceline: {self.by}: saving after this step; repeat the signal to stop immediately\n"
                os.write(2, message.encode())
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


@contextmanager
def record_stop_signals(*, announce: bool = False) -> Generator[StopSignalHandler]:
    """Record signals that request a stop, instead of ending the process. Ignored signals (nohup) stay ignored.

    In a thread other than the main thread it does nothing, because Python handles signals in the main thread only.
    """
    request = StopSignalHandler(announce=announce)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers, page = {number: signal.signal(number, request.handle) for number in handled}, HangGuard.of_process().page
    # the agent then sends SIGTERM for any stop signal that the launcher receives
    page.set_stop_counter("notes_stops", 1)
    try:
        yield request
    finally:
        page.set_stop_counter("notes_stops", 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
