"""Orders to a launcher or an agent from outside: stop signals, and the lifeline: what it says, and its end."""

import os
import select
import signal
import socket
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Protocol

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
TERMINALS = (signal.SIGINT, signal.SIGQUIT)  # a shell without job control has them ignored in what it starts with `&`
LIFELINE = 0  # stdin: held open by the launcher, who writes after the plan signs of life and orders, a line each
GRACE_SECONDS = 3.0  # from a request to a worker to stop until its kill; the sweep after it still ends within 5 s
LIFELINE_GRACE_SECONDS = min(2.0, GRACE_SECONDS)  # when the launcher is gone: nobody waits for a result any more
REMOTE_GRACE_SECONDS = 6.0  # when one at the other end of ssh is gone: time to save, and nothing left after 10 s
STOP_ORDERS = {f"stop {number.name}".encode(): number for number in STOP_SIGNALS}  # no signal crosses a network


class Readable(Protocol):
    """What select takes."""

    def fileno(self) -> int:
        """Its descriptor."""
        ...


def hold_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that our starter has closed, as /dev/null.

    Else the next socket would get their numbers: what is said to people would arrive there, in the inbox as signals.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


@contextmanager
def signal_inbox(signals: Iterable[signal.Signals]) -> Generator[socket.socket]:
    """Inside, these signals no longer interrupt: each is a byte to be read from the socket, in order of arrival.

    What the parent had set to be ignored stays so, or `nohup` would have no effect; but not what a shell ignores for
    `&`: whoever sends it to us by `kill` means it. Main thread only.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    wanted = [s for s in signals if s in (signal.SIGCHLD, *TERMINALS) or signal.getsignal(s) is not signal.SIG_IGN]
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


def wait_readable(descriptors: Sequence[Readable | int], seconds: float) -> set[int]:
    """The numbers of those that can be read now, or within `seconds`."""
    poll = select.poll()  # not select: it knows no descriptor beyond 1023
    for one in descriptors:
        poll.register(one, select.POLLIN)
    return {number for number, _ in poll.poll(1000 * max(0.0, seconds))}


class Orders:
    """All orders to an agent so far; none is ever taken back, so a later look still finds them.

    `inbox` is from `signal_inbox`; `lifeline`: a launcher holds stdin open (under Slurm or typed by hand, nobody does),
    and counts as gone after `silence_seconds` of silence; 0: never.
    """

    def __init__(self, inbox: socket.socket, *, lifeline: bool = True, silence_seconds: float = 0.0) -> None:
        self.signals: list[signal.Signals] = []
        self.launcher_gone = False
        self._inbox, self._lifeline, self._silence_seconds = inbox, lifeline, silence_seconds
        self._heard_seconds = time.monotonic()
        self._line = b""

    @property
    def given(self) -> bool:
        """Whether there is any order: to stop, all of them."""
        return self.launcher_gone or bool(self.signals)

    def wait(self, seconds: float, also: Sequence[Readable] = ()) -> bool:
        """Return after `seconds`, or earlier when an order comes in, a child ends or one of `also` can be read.

        Returns:
            Whether an order has come in, or a child has ended.
        """
        lifeline = [LIFELINE] if self._lifeline and not self.launcher_gone else []  # an end stays readable for ever
        if lifeline and self._silence_seconds:
            seconds = min(seconds, max(0.1, self._heard_seconds + self._silence_seconds - time.monotonic()))
        before = len(self.signals), self.launcher_gone
        ready = wait_readable([self._inbox, *lifeline, *also], seconds)
        if woken := self._inbox.fileno() in ready:
            self.signals += read_inbox(self._inbox)
        if LIFELINE in ready:
            self._hear(os.read(LIFELINE, 4096))
        elif lifeline and self._silence_seconds and time.monotonic() > self._heard_seconds + self._silence_seconds:
            self.launcher_gone = True  # the network between us is cut: no end will ever be read
        return woken or before != (len(self.signals), self.launcher_gone)

    def _hear(self, data: bytes) -> None:
        self._heard_seconds = time.monotonic()
        self.launcher_gone = not data
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[-100:]  # no order is longer
        self.signals += [STOP_ORDERS[line] for line in lines if line in STOP_ORDERS]
