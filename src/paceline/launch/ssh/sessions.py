"""The launcher's session with each host: an ssh client that passes orders on, and ends when the agent there ends."""

import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO

from paceline.contract.orders import read_inbox
from paceline.errors import UsageError
from paceline.launch.job import Command

BREATH_SECONDS = 2.0  # between signs of life; the agents allow NodePlan.silence_seconds of silence
KEPT_WORDS_BYTES = 8192  # of each session's stderr, which ends with why it failed
READ_BYTES = 65536
LAST_WORDS_BYTES = 1 << 20  # read at most that much after its end


@dataclass
class HostSession:
    """One host's ssh client and what is known of it."""

    node: int
    command: Command
    process: subprocess.Popen[bytes]
    told: bool = False  # it has its plan: from now on it gets signs of life
    unsent: bytes = b""
    words: bytes = b""  # the end of what came on its stderr
    ended: bool = False  # and read to the end
    pipes: dict[IO[bytes], int] = field(default_factory=dict[IO[bytes], int])  # still open -> 1 (its stdout) or 2

    @property
    def name(self) -> str:
        """The host, for people."""
        return self.command.name

    @property
    def code(self) -> int:
        """Its exit code; only of one that has ended."""
        assert self.process.returncode is not None
        return self.process.returncode


@dataclass(frozen=True)
class Output:
    """What came out of one session: from its stdout (1) or stderr (2)."""

    session: HostSession
    descriptor: int
    data: bytes


class Sessions:
    """The sessions of all hosts, node 0 first."""

    def __init__(self, inbox: socket.socket) -> None:
        self.all: list[HostSession] = []
        self._inbox = inbox
        self._breath_seconds = 0.0

    def tell(self, session: HostSession, line: bytes) -> None:
        """Send a line; what the host cannot take now is sent later."""
        if session.process.stdin is not None and not session.process.stdin.closed:
            session.unsent += line + b"\n"
            self._send(session)

    def wait(self, seconds: float, *, read: bool = True) -> tuple[list[Output], list[signal.Signals]]:
        """What came within `seconds`, and the stop signals to us; earlier when there is something, or one has ended.

        Without `read` the output stays where it is; what can be sent is sent all the same.
        """
        self._breathe()
        poll = select.poll()
        poll.register(self._inbox, select.POLLIN)
        pipes = {pipe.fileno(): (session, pipe) for session in self.all for pipe in session.pipes}
        for pipe in pipes if read else ():
            poll.register(pipe, select.POLLIN)
        for session in self.all:
            if session.unsent and session.process.stdin is not None:
                poll.register(session.process.stdin, select.POLLOUT)
        until_breath = self._breath_seconds + BREATH_SECONDS - time.monotonic()
        ending = any(not session.ended and session.process.poll() is not None for session in self.all)
        ready = poll.poll(0 if ending else 1000 * max(0.0, min(seconds, until_breath)))
        signals = read_inbox(self._inbox)
        for session in self.all:
            self._send(session)
        pieces = [piece for fd, _ in ready if fd in pipes for piece in self._read(*pipes[fd])]
        return pieces, signals

    def reap(self) -> tuple[list[HostSession], list[Output]]:
        """The sessions that have ended since the last call, and their last words."""
        ended = [session for session in self.all if not session.ended and session.process.poll() is not None]
        pieces: list[Output] = []
        for session in ended:
            session.ended = True
            for pipe in list(session.pipes):
                size = 0
                while size < LAST_WORDS_BYTES and (more := self._read(session, pipe)):
                    pieces += more
                    size += len(more[0].data)
                self._close(session, pipe)
            self._hang_up(session)
        return ended, pieces

    def hang_up(self) -> None:
        """Close all lifelines: the agents end their workers."""
        for session in self.all:
            self._hang_up(session)

    def kill(self) -> None:
        """End the clients themselves, with their helpers (a jump host's client): a cut one may not end."""
        for number, seconds in ((signal.SIGTERM, 0.5), (signal.SIGKILL, math.inf)):
            for session in self.all:
                if session.process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(session.process.pid, number)
            deadline = time.monotonic() + seconds
            for session in self.all:
                with suppress(subprocess.TimeoutExpired):
                    left = deadline - time.monotonic()
                    session.process.wait(None if left == math.inf else max(0.0, left))

    def close(self) -> None:
        """Let go of every pipe and process."""
        self.hang_up()
        self.kill()
        for session in self.all:
            for pipe in list(session.pipes):
                self._close(session, pipe)

    def _breathe(self) -> None:
        now = time.monotonic()
        if now < self._breath_seconds + BREATH_SECONDS:
            return
        self._breath_seconds = now
        for session in self.all:
            if session.told and not session.unsent:
                self.tell(session, b"")

    def _send(self, session: HostSession) -> None:
        stdin = session.process.stdin
        if not session.unsent or stdin is None:
            return
        try:
            session.unsent = session.unsent[os.write(stdin.fileno(), session.unsent) :]
        except BlockingIOError:
            return
        except OSError:  # it is ending; its exit code says why
            session.unsent = b""

    def _read(self, session: HostSession, pipe: IO[bytes]) -> list[Output]:
        try:
            data = os.read(pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._close(session, pipe)
            return []
        if session.pipes[pipe] == 2:
            session.words = (session.words + data)[-KEPT_WORDS_BYTES:]
        return [Output(session, session.pipes[pipe], data)]

    def _close(self, session: HostSession, pipe: IO[bytes]) -> None:
        session.pipes.pop(pipe, None)
        pipe.close()

    def _hang_up(self, session: HostSession) -> None:
        session.unsent = b""
        if session.process.stdin is not None:
            with suppress(OSError):
                session.process.stdin.close()


@contextmanager
def open_sessions(commands: Sequence[Command], inbox: socket.socket) -> Generator[Sessions]:
    """Start them all at once; none is left afterwards.

    Raises:
        UsageError: when the program is missing.
    """
    every = Sessions(inbox)
    try:
        for node, command in enumerate(commands):
            every.all.append(_start(node, command))
        yield every
    finally:
        every.close()


def _start(node: int, command: Command) -> HostSession:
    try:
        process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us: we tell the agents
            bufsize=0,
        )
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no program {command.argv[0]!r} here: install the OpenSSH client, or name yours with --ssh"
        ) from error
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    for stream in (process.stdin, process.stdout, process.stderr):
        os.set_blocking(stream.fileno(), False)
    return HostSession(node, command, process, pipes={process.stdout: 1, process.stderr: 2})
