"""What has a launcher or an agent been told from outside? Stop signals, and the end of the lifeline."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Generator, Iterable
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LIFELINE = 0  # stdin: held open by the launcher, who writes nothing after the plan


@contextmanager
def signal_inbox(signals: Iterable[signal.Signals]) -> Generator[socket.socket]:
    """Inside, these signals no longer interrupt: each is a byte to be read from the socket, in order of arrival.

    What the parent had set to be ignored stays so, or `nohup` would have no effect. Main thread only.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    wanted = [s for s in signals if s == signal.SIGCHLD or signal.getsignal(s) is not signal.SIG_IGN]
    previous = {s: signal.signal(s, _only_wake) for s in wanted}
    previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)  # the launcher starts agents with them blocked
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def _only_wake(number: int, frame: object) -> None:
    """The byte in the inbox is all that is wanted of a signal."""


def read_inbox(inbox: socket.socket) -> list[signal.Signals]:
    """The stop signals that came since the last call; SIGCHLD only wakes."""
    try:
        return [signal.Signals(n) for n in inbox.recv(4096) if n in STOP_SIGNALS]
    except BlockingIOError:
        return []


class Orders:
    """All orders to an agent so far; none is ever taken back, so whoever comes to look later still finds them."""

    def __init__(self, inbox: socket.socket) -> None:
        self.signals: list[signal.Signals] = []
        self.launcher_gone = False
        self._inbox = inbox

    def wait(self, seconds: float) -> None:
        """Return after `seconds`, or earlier when an order comes in or a child ends."""
        lifeline = [] if self.launcher_gone else [LIFELINE]  # an end stays readable for ever
        ready, _, _ = select.select([self._inbox, *lifeline], [], [], max(0.0, seconds))
        if self._inbox in ready:
            self.signals += read_inbox(self._inbox)
        if LIFELINE in ready and not os.read(LIFELINE, 4096):
            self.launcher_gone = True
