"""Ends all processes of an agent: the roster of its workers, the kill of their sessions, and the cleanup process.

The kernel's death signal ends workers with their agent (rank/attach.py), but not the programs that workers have
started. If the agent is killed, the cleanup process ends them: a fork of the agent that sleeps on a pipe, which closes
when the agent ends.
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from paceline.host.procfs import PROC, Process, processes, read_process
from paceline.protocol.control import AGENT_MARK, STOP_SIGNALS
from paceline.runs.reading import list_names, read_json

KILL_SECONDS = 2.0

Pid = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Ticks = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class RosterWorker(msgspec.Struct, frozen=True):
    """A worker, which is the leader of a session; `started` is in clock ticks since boot."""

    rank: int
    pid: Pid
    started: Ticks


class Roster(msgspec.Struct, frozen=True):
    host: str
    agent_pid: Pid
    workers: tuple[RosterWorker, ...]
    agent_started: Ticks = 0  # since the host's boot


def roster_path(attempt_dir: Path, node: int = 0) -> Path:
    return attempt_dir / f"agent-{node}.json"


def start_ticks(pid: int) -> int:
    process = read_process(pid)
    return process.start_ticks if process else 0


def agent_mark(generation: object) -> str:
    """The value of AGENT_MARK in all processes that this agent has started for a generation, or for another purpose."""
    return f"{_mark_prefix(os.getpid(), start_ticks(os.getpid()))}{generation}-"


def _mark_prefix(agent_pid: int, agent_started: int) -> str:
    return f"{agent_pid}-{agent_started}-"


def kill_sessions(workers: Sequence[RosterWorker], mark: str = "", *, variable: str = AGENT_MARK) -> list[int]:
    """Send SIGKILL to every process in the sessions of these workers, until none is left or KILL_SECONDS are over.

    Death signals and process groups do not reach the processes that a user's code has started. Therefore it
    finds processes by session, and by the agent's `mark` in an environment variable, which new sessions also inherit.

    Returns:
        The pids that are left, because the kernel keeps them.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while (living := _living_members(workers, mark, variable)) and time.monotonic() < deadline:
        for process in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.02)  # then again, because a process may fork before its kill
    return [process.pid for process in living]


def _living_members(workers: Sequence[RosterWorker], mark: str, variable: str) -> list[Process]:
    started = {worker.pid: worker.started for worker in workers}
    all_processes = [*processes()]
    members = [process for process in all_processes if process.session in started]
    # The kernel reuses the number of a session only after its last process has ended. A leader with a different start
    # time, and its session, therefore do not belong to the agent.
    foreign = {p.pid for p in members if p.pid == p.session and p.start_ticks != started[p.pid]}
    living = [p for p in members if p.runs and p.session not in foreign and p.start_ticks >= started[p.session]]
    others = (p for p in all_processes if p.runs and p.session not in started)
    return [*living, *(p for p in others if mark and has_environment_mark(p.pid, variable, mark))]


def has_environment_mark(pid: int, variable: str, mark: str) -> bool:
    """Whether the environment of a process has this variable with a value that begins with `mark`."""
    try:
        return f"\0{variable}={mark}".encode() in b"\0" + (PROC / str(pid) / "environ").read_bytes()
    except OSError:  # a different user's process, or one that has ended
        return False


def kill_recorded_workers(attempt_dir: Path, agent_pid: int = 0) -> None:
    """Sweep the workers in the rosters of all agents of this host, or of one agent."""
    try:
        files = list_names(attempt_dir)
    except OSError:
        return
    for name in files:
        if not re.fullmatch(r"agent-[0-9]{1,9}\.json", name):
            continue
        try:
            roster = read_json(attempt_dir / name, Roster, ours=True)  # only files of this user
        except OSError:
            continue
        if roster.host == os.uname().nodename and agent_pid in (0, roster.agent_pid):
            kill_sessions(roster.workers, _mark_prefix(roster.agent_pid, roster.agent_started))


def start_cleanup_process(not_kept: Sequence[int] = (), temporary: str = "") -> int:
    """Fork the cleanup process; return the descriptor of its pipe. It sleeps until this process ends.

    Call it before there are threads, sockets or children, because a fork keeps all descriptors of its parent open. The
    cleanup process immediately closes `not_kept`, the descriptors of the run. At its end it removes `temporary`.
    """
    read_end, write_end = os.pipe()
    agent_pid = os.getpid()
    if os.fork():
        os.close(read_end)
        return write_end
    try:
        os.setsid()
        os.close(write_end)
        for descriptor in not_kept:
            os.close(descriptor)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        devnull = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # so that a pipe with the agent's output does not wait for the cleanup process
            os.dup2(devnull, standard)
        folders = b""
        while data := os.read(read_end, 4096):
            folders += data
        for folder in {*folders.split(b"\0")} - {b""}:
            kill_recorded_workers(Path(os.fsdecode(folder)), agent_pid)
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
    finally:
        os._exit(0)  # never return into the agent's code
