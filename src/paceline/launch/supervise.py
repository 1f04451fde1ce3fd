"""What launcher and agent share, and the launcher's half: start the agents, wait, and leave nothing behind.

Who ends the workers, when one of us is killed with SIGKILL:

    the launcher   the agent: its stdin, the lifeline, ends
    an agent       the launcher: it sweeps the sessions that the agent wrote down in agent.json
    both           the kernel ends the workers (worker.attach), the agent's janitor ends what they had started
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.launch.job import GRACE_SECONDS, Command, NodePlan, Plan
from paceline.launch.procfs import PROC, Process, processes

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LIFELINE_GRACE_SECONDS = min(2.0, GRACE_SECONDS)  # when the launcher is gone: nobody waits for a result any more
AGENT_MARGIN_SECONDS = 1.2  # an agent that was told to stop needs that much more than its workers' grace
SWEEP_SECONDS = 2.0


class Member(msgspec.Struct, frozen=True):
    """A worker, leader of a session of its own; `started` in clock ticks since boot, 0 where /proc is missing."""

    rank: int
    pid: int
    started: int


class Roster(msgspec.Struct, frozen=True):
    """Whom an agent has started: the content of agent.json."""

    host: str
    agent_pid: int
    workers: tuple[Member, ...]


def roster_path(attempt_dir: Path) -> Path:
    """Where an agent writes its roster."""
    return attempt_dir / "agent.json"


def say(text: str, end: str = "\n") -> None:
    """Tell the user; never an error, for the terminal may be gone with the launcher."""
    with suppress(OSError):
        data = f"{text}{end}".encode(errors="replace")
        while data:
            data = data[os.write(2, data) :]


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


def ask_to_stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to this one process, also when it is stopped.

    Not to its group or session: a trainer's DataLoader workers must not die under it while it stops in good order.
    """
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)  # after it: a stopped process wakes up with the request already pending


def sweep(workers: Sequence[Member], *, seconds: float = SWEEP_SECONDS) -> None:
    """SIGKILL to every process in these workers' sessions, until none is left or `seconds` are over.

    By session, since neither death signals nor groups reach what a user's code had started.
    """
    if not PROC.is_dir():
        for worker in workers:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)
        return
    deadline = time.monotonic() + seconds
    while (living := _living_members(workers)) and time.monotonic() < deadline:
        for process in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.02)  # again: a process can fork between the look and the blow


def _living_members(workers: Sequence[Member]) -> list[Process]:
    started = {worker.pid: worker.started for worker in workers}
    members = [process for process in processes() if process.session in started]
    # the kernel gives a session's number out again only when its last process is gone: a leader that started at
    # another time is a stranger's, and so is its session
    strangers = {p.pid for p in members if p.pid == p.session and p.start != started[p.pid]}
    return [p for p in members if p.runs and p.session not in strangers and p.start >= started[p.session]]


def sweep_recorded(attempt_dir: Path) -> None:
    """Sweep what the agent of this host wrote down, if it got that far."""
    try:
        roster = msgspec.json.decode(roster_path(attempt_dir).read_bytes(), type=Roster)
    except (OSError, msgspec.MsgspecError):
        return
    if roster.host == os.uname().nodename:
        sweep(roster.workers)


class RunningAgent(NamedTuple):
    """An agent and its name."""

    name: str
    process: subprocess.Popen[bytes]


def run(plan: Plan, attempt_dir: Path) -> int:
    """Run the plan to its end; return the exit code, which a stop signal n makes 128 + n. Main thread only.

    What there is to tell is on stderr by then. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 stop the run in good
    order, a second SIGINT at once. No process of the run is left on this host when this returns or is killed.

    Raises:
        OSError: when an agent cannot be started.
    """
    roster_path(attempt_dir).unlink(missing_ok=True)  # never sweep by an earlier run's
    agents: list[RunningAgent] = []
    with signal_inbox((*STOP_SIGNALS, signal.SIGCHLD)) as inbox:
        try:
            agents += (_start(agent, node) for agent, node in zip(plan.agents, plan.nodes, strict=True))
            return _wait(agents, inbox, max(node.grace_seconds for node in plan.nodes) + AGENT_MARGIN_SECONDS)
        finally:
            _end(agents)
            sweep_recorded(attempt_dir)


def _start(agent: Command, node: NodePlan) -> RunningAgent:
    # blocked, until the agent can handle them: forwarded too early, SIGINT would end it with a traceback
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process = subprocess.Popen(
            agent.argv, env={**os.environ, **agent.env}, stdin=subprocess.PIPE, start_new_session=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it ended at once; its exit code says so
        process.stdin.write(msgspec.json.encode(node) + b"\n")
        process.stdin.flush()  # and stays open: the lifeline
    return RunningAgent(agent.name, process)


def _wait(agents: Sequence[RunningAgent], inbox: socket.socket, patience_seconds: float) -> int:
    stopped_by: signal.Signals | None = None
    deadline = math.inf
    while True:
        codes = [agent.process.poll() for agent in agents]
        for agent, code in zip(agents, codes, strict=True):
            if code:
                return _tell_end(agent, code)
        if all(code == 0 for code in codes):
            return 0
        left = deadline - time.monotonic()
        if stopped_by is not None and left <= 0:  # an agent that does not react: stopped itself, say
            for agent in agents:
                agent.process.kill()
            return 128 + stopped_by
        select.select([inbox], [], [], None if stopped_by is None else left)
        for received in read_inbox(inbox):
            if stopped_by is None:
                stopped_by, deadline = received, time.monotonic() + patience_seconds
            for agent in agents:
                agent.process.send_signal(received)
                agent.process.send_signal(signal.SIGCONT)


def _tell_end(agent: RunningAgent, code: int) -> int:
    if code > 0:
        return code
    name = signal.Signals(-code).name
    say(f"{agent.name} (pid {agent.process.pid}) was killed by {name}; its workers are being stopped with it")
    return 128 - code


def _end(agents: Sequence[RunningAgent]) -> None:
    """Close the lifelines of what still runs and wait; kill what does not end by itself."""
    deadline = time.monotonic() + LIFELINE_GRACE_SECONDS + 1.0
    for agent in agents:
        assert agent.process.stdin is not None
        with suppress(BrokenPipeError):
            agent.process.stdin.close()
    for agent in agents:
        try:
            agent.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            agent.process.kill()
            agent.process.wait()
