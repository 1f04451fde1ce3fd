"""Starts a program on each host, and requests all data for the rules: facts, open ports, network speed."""

import errno
import os
import secrets
import shutil
import signal
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from paceline.lab.doctor import host as m
from paceline.launch.plan import Command
from paceline.launch.ssh.sessions import HostSession, OutputChunk, Sessions, open_sessions, why_no_agent
from paceline.protocol.control import STOP_SIGNALS, signal_wakeup

T = TypeVar("T")
PROGRAM = ("-P", "-m", "paceline.lab.doctor.host")
MAX_NOISE_LINES = 1000  # of a login shell's start-up files: more would delay the answers of other hosts
FIRST_ANSWER_TIMEOUT_SECONDS = 20.0  # to log in and start Python, perhaps from a slow file system
ANSWER_TIMEOUT_SECONDS = 10.0
CONNECT_SECONDS = 1.3  # a lost SYN is sent again after 1 s
MEASURE_SECONDS = 0.3
MAX_ADDRESSES = 16  # of one host
Pair = tuple[str, str]  # (from, to)


@dataclass(frozen=True)
class PlannedRun:
    hosts: tuple[str, ...]
    workers: tuple[int, ...]  # on each
    run_dir: str
    threads: int = 0  # of each worker; 0: the workers share the cores
    quick: bool = False


@dataclass(frozen=True)
class Survey:
    """All answers. A host in `lost` is missing from all later answers."""

    planned: PlannedRun
    lost: Mapping[str, str]
    hosts: Mapping[str, m.FactsAnswer]
    clock_offsets: Mapping[str, float]  # seconds that a host's clock is ahead of this machine's
    links_by_address: Mapping[Pair, Mapping[str, m.LinkMeasurement]]  # by address of the target
    # each host's access to the probe file; only the writer's if it could not write
    folder_access: Mapping[str, m.FolderProbeAnswer]
    measured_links: Mapping[Pair, m.LinkMeasurement]  # measured, from each host to the next one
    seconds: float


class HostProgramClient:
    """The programs on all hosts. If a host does not answer, `lost` has the reason, and it gets no further request."""

    def __init__(self, sessions: Sessions, lost: dict[str, str]) -> None:
        self.lost, self._sessions = lost, sessions
        self._unread: dict[str, bytes] = {}  # the beginning of the next line, by host
        self._answered: set[str] = set()
        self._noise: Counter[str] = Counter()  # number of lines that are no answers

    def ask(self, requests: Mapping[str, m.Request], answer_type: type[T], seconds: float) -> dict[str, T]:
        """Send requests to several hosts in parallel. Return the answers of the next `seconds`, by host."""
        asked = {s.name: s for s in self._sessions.all if s.name in requests and s.name not in self.lost}
        for name, session in asked.items():
            self._sessions.send_line(session, msgspec.json.encode(requests[name]))
        answers: dict[str, T] = {}
        deadline = time.monotonic() + seconds
        while (waiting := asked.keys() - answers.keys() - self.lost.keys()) and time.monotonic() < deadline:
            pieces, signals = self._sessions.wait_for_output(deadline - time.monotonic())
            if signals:
                raise SystemExit(128 + signals[0])
            ended, last_pieces = self._sessions.reap()
            for piece in (*pieces, *last_pieces):
                if piece.descriptor == 1 and piece.session.name in waiting:
                    for line in self._lines(piece):
                        try:
                            answers[piece.session.name] = msgspec.json.decode(line, type=answer_type)
                        except msgspec.MsgspecError:
                            self._lose(piece.session, f"answers {line[:1000].decode(errors='replace')}")
                        break
            for session in ended:
                self._lose(session, self._why_silent(session))
        for name in waiting:
            self._lose(asked[name], self._why_silent(asked[name]))
        return {name: answers[name] for name in requests if name in answers}

    def _lines(self, piece: OutputChunk) -> Iterator[bytes]:
        """The complete lines that may be answers. A login shell's start-up files may print others before the first."""
        name = piece.session.name
        *lines, self._unread[name] = (self._unread.get(name, b"") + piece.data).split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                self._answered.add(name)
                yield line
        self._noise[name] += sum(not line.startswith(b"{") for line in lines)
        if self._noise[name] > MAX_NOISE_LINES:
            shown = lines[-1][:80].decode(errors="replace")
            self._lose(piece.session, f"writes output that is not an answer: {shown!r}")
        if len(self._unread[name]) > m.MAX_LINE_BYTES:
            self._lose(piece.session, self._why_silent(piece.session))

    def _lose(self, session: HostSession, reason: str) -> None:
        self.lost.setdefault(session.name, reason)
        session.send_signal(signal.SIGTERM)

    def _why_silent(self, session: HostSession) -> str:
        """The reason why there is no answer: the message of ssh, or after the login the end of the program's stderr."""
        code = session.code if session.has_ended else None
        if "--" in session.command.argv and session.name not in self._answered:
            return why_no_agent(session.command.argv, code, session.stderr)
        errors = session.stderr.decode(errors="replace").split("\n")
        last = "; ".join(line.strip() for line in errors if line.strip())[-400:]
        outcome = "it did not answer in time" if code is None else f"it ended with exit code {code}"
        return f"{outcome}: {last}" if last else outcome


@contextmanager
def open_host_programs(commands: Sequence[Command]) -> Generator[HostProgramClient]:
    """Start all in parallel, and end them after the block. Main thread only."""
    found, reason = [command for command in commands if shutil.which(command.argv[0])], os.strerror(errno.ENOENT)
    lost = {c.name: f"{c.argv[0]} cannot be started: {reason}" for c in commands if c not in found}
    with signal_wakeup((*STOP_SIGNALS, signal.SIGCHLD)) as wakeup, open_sessions(found, wakeup) as sessions:
        yield HostProgramClient(sessions, lost)


def survey_hosts(planned: PlannedRun, programs: HostProgramClient) -> Survey:
    start = time.monotonic()
    tokens = {name: secrets.token_hex(16) for name in planned.hosts}
    requests = {name: m.FactsRequest(token, planned.run_dir) for name, token in tokens.items()}
    hosts = programs.ask(requests, m.FactsAnswer, FIRST_ANSWER_TIMEOUT_SECONDS)
    targets = {
        name: [m.ConnectTarget(a.address, host.port, tokens[name]) for a in host.facts.addresses[:MAX_ADDRESSES]]
        for name, host in hosts.items()
    }
    reach = _connect(programs, {(a, b): targets[b] for a in hosts for b in hosts if a != b})
    ring = {
        (a, b): [target for target in targets[b] if not reach[a, b][target.address].error][:1]
        for a, b in zip(hosts, [*hosts][1:] + [*hosts][:1], strict=True) if (a, b) in reach
    }  # fmt: skip
    measured = {} if planned.quick else _connect(programs, ring, MEASURE_SECONDS)
    links = {pair: link for pair, by_address in measured.items() for link in by_address.values() if not link.error}
    folder, offsets = _probe_folder(programs, [*hosts], planned.run_dir), _clock_offsets(programs, [*hosts])
    lost = {name: programs.lost[name] for name in planned.hosts if name in programs.lost}
    return Survey(planned, lost, hosts, offsets, reach, folder, links, time.monotonic() - start)


def _connect(
    programs: HostProgramClient, pairs: Mapping[Pair, Sequence[m.ConnectTarget]], measure_seconds: float = 0.0
) -> dict[Pair, dict[str, m.LinkMeasurement]]:
    attempts_by_host: dict[str, list[tuple[Pair, m.ConnectTarget]]] = {source: [] for source, _ in pairs}
    for pair, targets in pairs.items():
        attempts_by_host[pair[0]].extend((pair, target) for target in targets)
    requests = {
        name: m.ConnectRequest(tuple(target for _, target in attempts), CONNECT_SECONDS, measure_seconds)
        for name, attempts in attempts_by_host.items()
    }
    answers = programs.ask(requests, m.ConnectAnswer, ANSWER_TIMEOUT_SECONDS + CONNECT_SECONDS * len(attempts_by_host))
    links = {pair: dict[str, m.LinkMeasurement]() for pair in pairs if pair[0] in answers}
    for name, answer in answers.items():
        for (pair, target), link in zip(attempts_by_host[name], answer.links, strict=True):
            links[pair][target.address] = link
    return links


def _probe_folder(programs: HostProgramClient, names: Sequence[str], folder: str) -> dict[str, m.FolderProbeAnswer]:
    token, writer = secrets.token_hex(16), names[:1]

    def probe(act: Literal["write", "read", "remove"], hosts: Sequence[str]) -> dict[str, m.FolderProbeAnswer]:
        requests = dict.fromkeys(hosts, m.FolderProbeRequest(act, folder, token))
        return programs.ask(requests, m.FolderProbeAnswer, ANSWER_TIMEOUT_SECONDS)

    written = probe("write", writer)
    if any(done.error for done in written.values()):
        return written
    seen = probe("read", names)
    probe("remove", writer)
    return seen


def _clock_offsets(programs: HostProgramClient, names: Sequence[str]) -> dict[str, float]:
    """Compare each clock with this machine's clock at the middle between request and answer."""
    offsets: dict[str, float] = {}
    for name in names:
        wall_time, start = time.time(), time.monotonic()
        for answer in programs.ask({name: m.TimeRequest()}, m.TimeAnswer, ANSWER_TIMEOUT_SECONDS).values():
            offsets[name] = answer.wall_seconds - (wall_time + (time.monotonic() - start) / 2)
    return offsets
