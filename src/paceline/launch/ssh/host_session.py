"""One host's ssh client."""

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from paceline.errors import UsageError
from paceline.launch.plan import Command


@dataclass
class HostSession:
    """One host's ssh client and what is known of it."""

    node: int
    command: Command
    process: subprocess.Popen[bytes] | None = None  # None: its turn has not come
    answered: bool = False  # something has come of it, or it has ended
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
        assert self.process is not None and self.process.returncode is not None
        return self.process.returncode

    @property
    def has_ended(self) -> bool:
        """Whether its client is gone, as far as was looked (`Sessions`); its last words may still be in the pipes."""
        return self.process is not None and self.process.returncode is not None

    @property
    def stdin(self) -> IO[bytes] | None:
        """Its lifeline, while it is open."""
        stdin = self.process.stdin if self.process is not None else None
        return None if stdin is None or stdin.closed else stdin

    def send_signal(self, number: signal.Signals) -> None:
        """To the client and its helpers (a jump host's client), if it still runs."""
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


@dataclass(frozen=True)
class Output:
    """What came out of one session: from its stdout (1) or stderr (2)."""

    session: HostSession
    descriptor: int
    data: bytes


def start_session(session: HostSession) -> None:
    """Start its client.

    Raises:
        UsageError: when the program is missing.
    """
    command = session.command
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
        raise UsageError(code="no-ssh", value=command.argv[0]) from error
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    for stream in (process.stdin, process.stdout, process.stderr):
        os.set_blocking(stream.fileno(), False)
    session.process, session.pipes = process, {process.stdout: 1, process.stderr: 2}
