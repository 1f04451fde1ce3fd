"""Doctor's end of the program on each host: how it is started, asked and ended, and why it cannot be reached."""

import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec

from paceline.doctor.messages import MAX_LINE_BYTES, Refused, Request
from paceline.launch.job import Command
from paceline.launch.ssh.announcements import why_no_agent

T = TypeVar("T")
PROGRAM = ("-P", "-m", "paceline.doctor.host")
MAX_NOISE_LINES = 1000  # of a login shell's start-up files, before our first line
MAX_WORDS_BYTES = 1 << 16  # of its error output, the last of them
END_SECONDS = 2.0


def in_slurm(job_id: str, nodes: Sequence[str], cores: int, python: str) -> tuple[Command, ...]:
    """As one step on each node of an allocation, beside whatever runs there, on so many cores."""
    options = ("--overlap", "--nodes=1", "--ntasks=1", f"--cpus-per-task={cores}", "--unbuffered", "--quiet")
    return tuple(
        Command(node, ("srun", f"--jobid={job_id}", f"--nodelist={node}", *options, python, *PROGRAM)) for node in nodes
    )


class HostProgram:
    """A host's program and the pipes to it. Once `lost` says why, it answers nothing more."""

    def __init__(self, command: Command) -> None:
        self.name = command.name
        self._argv = command.argv
        self._answered = False
        self.lost = ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would fill; closed in `end`
        self._buffer = b""
        self._noise = 0
        try:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                command.argv,
                env={**os.environ, **command.env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is ours alone; closing stdin ends the rest
            )
        except OSError as error:
            self._process, self.lost = None, f"{command.argv[0]} cannot be started: {error.strerror}"

    def send(self, request: Request) -> None:
        """Ask; `read` has the answer."""
        if self._process is None or self.lost:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.lost = self._why(self._code())

    def read(self, kind: type[T], deadline: float) -> T | None:
        """The answer to what was sent; None if it was refused, or the host is lost.

        One that has not answered by `deadline`, on time.monotonic()'s clock, is lost.
        """
        while (line := self._line(deadline)) is not None:
            if line.startswith(b"{"):
                self._answered = True
                with suppress(msgspec.MsgspecError):
                    return msgspec.json.decode(line, type=kind)
                self.lost = f"answers {_refusal(line)}"
                return None
            self._noise += 1
            if self._noise > MAX_NOISE_LINES:
                self.lost = f"writes other things than answers: {line[:80].decode(errors='replace')!r}"
        return None

    def _line(self, deadline: float) -> bytes | None:
        if self._process is None or self.lost:
            return None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.lost = self._why(None)
                    return None
                more = os.read(self._process.stdout.fileno(), 1 << 16)
                self._buffer += more
                if not more or len(self._buffer) > MAX_LINE_BYTES:
                    self.lost = self._why(self._code())
                    return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

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

    def _code(self) -> int | None:
        """Its exit code; None if it has only stopped writing."""
        assert self._process is not None
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return None

    def _why(self, code: int | None) -> str:
        """Why there is no answer: what ssh says where no login was possible, else the program's last words."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - MAX_WORDS_BYTES))
        words = self._errors.read()
        if "--" in self._argv and not self._answered:
            return why_no_agent(self._argv, code, words)
        last = "; ".join(line.strip() for line in words.decode(errors="replace").split("\n") if line.strip())[-400:]
        how = "it did not answer in time" if code is None else f"it ended with exit code {code}"
        return f"{how}: {last}" if last else how


def _refusal(line: bytes) -> str:
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(line, type=Refused).refused
    return line[:200].decode(errors="replace")


@contextmanager
def host_programs(commands: Sequence[Command]) -> Generator[list[HostProgram]]:
    """All started at once; inside they can be asked, and none is left after."""
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
    """Ask several hosts at the same time, for `seconds` in all: the answers, of this `kind`, by host.

    A host without a request is not asked; the program of one that gave no answer says why not.
    """
    asked = [program for program in programs if program.name in requests]
    deadline = time.monotonic() + seconds
    for program in asked:
        program.send(requests[program.name])
    answers = {program.name: program.read(kind, deadline) for program in asked}
    return {name: answer for name, answer in answers.items() if answer is not None}
