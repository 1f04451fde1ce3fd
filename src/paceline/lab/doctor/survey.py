"""Starts a program on each host, and requests all data for the rules: facts, open ports, network speed."""

import os
import secrets
import select
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from paceline.lab.doctor import messages as m
from paceline.launch.plan import Command
from paceline.launch.ssh.sessions import why_no_agent

T = TypeVar("T")
PROGRAM = ("-P", "-m", "paceline.lab.doctor.host")
MAX_NOISE_LINES = 1000  # of a login shell's start-up files, before the first answer
MAX_STDERR_BYTES = 1 << 16  # the last of them are read
EXIT_TIMEOUT_SECONDS = 2.0
FIRST_ANSWER_TIMEOUT_SECONDS = 20.0  # to log in and start Python, perhaps from a slow file system
ANSWER_TIMEOUT_SECONDS = 10.0
CONNECT_SECONDS = 1.3  # a lost SYN is sent again after 1 s
MEASURE_SECONDS = 0.3
MAX_ADDRESSES = 16  # of one host
Pair = tuple[str, str]  # (from, to)


@dataclass(frozen=True)
class PlannedUse:
    """The planned use of the hosts."""

    hosts: tuple[str, ...]
    workers: tuple[int, ...]  # on each
    run_dir: str
    threads: int = 0  # of each worker; 0: the workers share the cores
    quick: bool = False


@dataclass(frozen=True)
class Survey:
    """All answers. A host in `lost` is missing from all later answers."""

    wanted: PlannedUse
    lost: Mapping[str, str]
    hosts: Mapping[str, m.ExamineAnswer]
    clock_offsets: Mapping[str, float]  # seconds that a host's clock is ahead of this machine's
    links_by_address: Mapping[Pair, Mapping[str, m.Link]]  # by address of the target
    # each host's access to the probe file; only the writer's if it could not write
    folder_access: Mapping[str, m.FolderProbeAnswer]
    measured_links: Mapping[Pair, m.Link]  # measured, from each host to the next one
    seconds: float


class HostProgram:
    """The program on a host and the pipes to it. After a failure `lost` has the reason."""

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

    def send(self, request: m.Request) -> None:
        """Send a request; `read` returns the answer."""
        if self.lost or self._process is None:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.lost = self._no_answer_reason(ended=True)

    def read(self, answer_type: type[T], deadline: float) -> T | None:
        """The answer to the request; None if the host is lost, or has not answered by `deadline`."""
        while self._await_line(deadline):
            line, _, self._buffer = self._buffer.partition(b"\n")
            if line.startswith(b"{"):
                self._answered = True
                with suppress(msgspec.MsgspecError):
                    return msgspec.json.decode(line, type=answer_type)
                self.lost = f"answers {line[:1000].decode(errors='replace')}"
            self._noise += 1
            if self._noise > MAX_NOISE_LINES:
                self.lost = f"writes output that is not an answer: {line[:80].decode(errors='replace')!r}"
        return None

    def _await_line(self, deadline: float) -> bool:
        """Wait for a line. If there is none, the host is lost."""
        if self.lost or self._process is None:
            return False
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._buffer and not self.lost:
            if not poll.poll(max(0.0, 1e3 * (deadline - time.monotonic()))):
                self.lost = self._no_answer_reason(ended=False)
            elif not (data := os.read(self._process.stdout.fileno(), 1 << 16)) or len(self._buffer) > m.MAX_LINE_BYTES:
                self.lost = self._no_answer_reason(ended=True)
            else:
                self._buffer += data
        return not self.lost

    def end(self) -> None:
        """Close stdin, which ends the program on the host. Kill the local process if it does not end."""
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            with suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(EXIT_TIMEOUT_SECONDS if not self.lost else 0.2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
        self._errors.close()

    def _no_answer_reason(self, *, ended: bool) -> str:
        """The reason why there is no answer: the message of ssh, or after the login the end of the program's stderr."""
        code = None
        if ended and self._process is not None:
            with suppress(subprocess.TimeoutExpired):  # it may have closed only its stdout
                code = self._process.wait(1.0)
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - MAX_STDERR_BYTES))
        errors = self._errors.read()
        if "--" in self._argv and not self._answered:
            return why_no_agent(self._argv, code, errors)
        last = "; ".join(line.strip() for line in errors.decode(errors="replace").split("\n") if line.strip())[-400:]
        outcome = "it did not answer in time" if code is None else f"it ended with exit code {code}"
        return f"{outcome}: {last}" if last else outcome


@contextmanager
def run_host_programs(commands: Sequence[Command]) -> Generator[list[HostProgram]]:
    """Start all in parallel, and end them after the block."""
    programs: list[HostProgram] = []
    try:
        programs.extend(HostProgram(command) for command in commands)
        yield programs
    finally:
        for program in programs:
            program.end()


def ask_hosts(
    programs: Sequence[HostProgram], requests: Mapping[str, m.Request], answer_type: type[T], seconds: float
) -> dict[str, T]:
    """Send requests to several hosts in parallel. Return the answers of the next `seconds`, by host.

    If a host does not answer, `lost` of its program has the reason.
    """
    recipients = [program for program in programs if program.name in requests]
    deadline = time.monotonic() + seconds
    for program in recipients:
        program.send(requests[program.name])
    answers = {program.name: program.read(answer_type, deadline) for program in recipients}
    return {name: answer for name, answer in answers.items() if answer is not None}


def survey_hosts(wanted: PlannedUse, programs: Sequence[HostProgram]) -> Survey:
    """Send all requests. Each has a time limit. A host that does not answer in time is `lost`."""
    start = time.monotonic()
    tokens = {name: secrets.token_hex(16) for name in wanted.hosts}
    requests = {name: m.Examine(token, wanted.run_dir) for name, token in tokens.items()}
    hosts = ask_hosts(programs, requests, m.ExamineAnswer, FIRST_ANSWER_TIMEOUT_SECONDS)
    targets = {
        name: [m.Target(a.address, host.port, tokens[name]) for a in host.facts.addresses[:MAX_ADDRESSES]]
        for name, host in hosts.items()
    }
    reach = _connect(programs, {(a, b): targets[b] for a in hosts for b in hosts if a != b})
    ring = {
        (a, b): [target for target in targets[b] if not reach[a, b][target.address].error][:1]
        for a, b in zip(hosts, [*hosts][1:] + [*hosts][:1], strict=True) if (a, b) in reach
    }  # fmt: skip
    measured = {} if wanted.quick else _connect(programs, ring, MEASURE_SECONDS)
    links = {pair: link for pair, by_address in measured.items() for link in by_address.values() if not link.error}
    folder, offsets = _probe_folder(programs, [*hosts], wanted.run_dir), _clock_offsets(programs, [*hosts])
    lost = {program.name: program.lost for program in programs if program.lost}
    return Survey(wanted, lost, hosts, offsets, reach, folder, links, time.monotonic() - start)


def _connect(
    programs: Sequence[HostProgram], pairs: Mapping[Pair, Sequence[m.Target]], measure_seconds: float = 0.0
) -> dict[Pair, dict[str, m.Link]]:
    """All hosts connect to their targets in parallel. Returns the link to each address, by pair."""
    attempts_by_host: dict[str, list[tuple[Pair, m.Target]]] = {source: [] for source, _ in pairs}
    for pair, targets in pairs.items():
        attempts_by_host[pair[0]].extend((pair, target) for target in targets)
    requests = {
        name: m.Connect(tuple(target for _, target in attempts), CONNECT_SECONDS, measure_seconds)
        for name, attempts in attempts_by_host.items()
    }
    answers = ask_hosts(
        programs, requests, m.ConnectAnswer, ANSWER_TIMEOUT_SECONDS + CONNECT_SECONDS * len(attempts_by_host)
    )
    links = {pair: dict[str, m.Link]() for pair in pairs if pair[0] in answers}
    for name, answer in answers.items():
        for (pair, target), link in zip(attempts_by_host[name], answer.links, strict=True):
            links[pair][target.address] = link
    return links


def _probe_folder(programs: Sequence[HostProgram], names: Sequence[str], folder: str) -> dict[str, m.FolderProbeAnswer]:
    """Let the first host write a file, and all hosts read it. Returns the result of each host."""
    token, writer = secrets.token_hex(16), names[:1]
    write_results = ask_hosts(
        programs, dict.fromkeys(writer, m.Probe("write", folder, token)), m.FolderProbeAnswer, ANSWER_TIMEOUT_SECONDS
    )
    if any(done.error for done in write_results.values()):
        return write_results
    read_results = ask_hosts(
        programs, dict.fromkeys(names, m.Probe("read", folder, token)), m.FolderProbeAnswer, ANSWER_TIMEOUT_SECONDS
    )
    ask_hosts(
        programs, dict.fromkeys(writer, m.Probe("remove", folder, token)), m.FolderProbeAnswer, ANSWER_TIMEOUT_SECONDS
    )
    return read_results


def _clock_offsets(programs: Sequence[HostProgram], names: Sequence[str]) -> dict[str, float]:
    """Compare each clock with this machine's clock at the middle between request and answer."""
    offsets: dict[str, float] = {}
    for name in names:
        alloc_time, start = time.time(), time.monotonic()
        for answer in ask_hosts(programs, {name: m.AskTime()}, m.Time, ANSWER_TIMEOUT_SECONDS).values():
            offsets[name] = answer.wall_seconds - (alloc_time + (time.monotonic() - start) / 2)
    return offsets
