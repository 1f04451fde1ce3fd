"""Doctor's end of the program on each host: starts it, asks it, ends it, and reports why a host does not answer."""

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec

from paceline.doctor.messages import MAX_LINE_BYTES, Request
from paceline.launch.plan import Command
from paceline.launch.ssh.sessions import why_no_agent

T = TypeVar("T")
PROGRAM = ("-P", "-m", "paceline.doctor.host")
MAX_NOISE_LINES = 1000  # of a login shell's start-up files, before the first answer
MAX_STDERR_BYTES = 1 << 16  # the last of them are read
END_SECONDS = 2.0


class HostProgram:
    """A host's program and the pipes to it. Once `lost` has the reason, it answers nothing more."""

    def __init__(self, command: Command) -> None:
        self.name = command.name
        self.lost = ""
        self._argv = command.argv
        self._answered, self._buffer, self._noise = False, b"", 0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that is not read would fill; closed in `end`
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                command.argv, env={**os.environ, **command.env},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for this process only; closing stdin ends the others
            )  # fmt: skip
        except OSError as error:
            self.lost = f"{command.argv[0]} cannot be started: {error.strerror}"

    def send(self, request: Request) -> None:
        """Ask; `read` has the answer."""
        if self.lost or self._process is None:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.lost = self._why(ended=True)

    def read(self, kind: type[T], deadline: float) -> T | None:
        """The answer to what was sent; None if the host is lost, or has not answered by `deadline`."""
        while self._await_line(deadline):
            line, _, self._buffer = self._buffer.partition(b"\n")
            if line.startswith(b"{"):
                self._answered = True
                with suppress(msgspec.MsgspecError):
                    return msgspec.json.decode(line, type=kind)
                self.lost = f"answers {line[:1000].decode(errors='replace')}"
            self._noise += 1
            if self._noise > MAX_NOISE_LINES:
                self.lost = f"writes other things than answers: {line[:80].decode(errors='replace')!r}"
        return None

    def _await_line(self, deadline: float) -> bool:
        """Whether there is a line; the host is lost otherwise."""
        if self.lost or self._process is None:
            return False
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._buffer and not self.lost:
            if not poll.poll(max(0.0, 1e3 * (deadline - time.monotonic()))):
                self.lost = self._why(ended=False)
            elif not (more := os.read(self._process.stdout.fileno(), 1 << 16)) or len(self._buffer) > MAX_LINE_BYTES:
                self.lost = self._why(ended=True)
            else:
                self._buffer += more
        return not self.lost

    def end(self) -> None:
        """Close its stdin, which ends it there; leave nothing here."""
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            with suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(END_SECONDS if not self.lost else 0.2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
        self._errors.close()

    def _why(self, *, ended: bool) -> str:
        """Why there is no answer: what ssh prints if no login was possible, else the end of the program's stderr."""
        code = None
        if ended and self._process is not None:
            with suppress(subprocess.TimeoutExpired):  # it may only have stopped writing
                code = self._process.wait(1.0)
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - MAX_STDERR_BYTES))
        words = self._errors.read()
        if "--" in self._argv and not self._answered:
            return why_no_agent(self._argv, code, words)
        last = "; ".join(line.strip() for line in words.decode(errors="replace").split("\n") if line.strip())[-400:]
        how = "it did not answer in time" if code is None else f"it ended with exit code {code}"
        return f"{how}: {last}" if last else how


@contextmanager
def host_programs(commands: Sequence[Command]) -> Generator[list[HostProgram]]:
    """Start all in parallel, and end them after the block."""
    opened: list[HostProgram] = []
    try:
        opened.extend(HostProgram(command) for command in commands)
        yield opened
    finally:
        for program in opened:
            program.end()


def ask_hosts(
    programs: Sequence[HostProgram], requests: Mapping[str, Request], kind: type[T], seconds: float
) -> dict[str, T]:
    """The answers of several hosts, by host, asked in parallel for `seconds` in total.

    A host without a request is not asked. The program of a host that gave no answer has the reason.
    """
    asked = [program for program in programs if program.name in requests]
    deadline = time.monotonic() + seconds
    for program in asked:
        program.send(requests[program.name])
    answers = {program.name: program.read(kind, deadline) for program in asked}
    return {name: answer for name, answer in answers.items() if answer is not None}
