"""The rendezvous of the ranks of one job, without foreign processes and without a silent wait.

First all ranks compare the name of the job and the size of the world in their store, and each claims its rank.
Otherwise two jobs on one port would merge silently, and one exported value of RANK for all ranks would look like a
hang. Store calls may block forever despite torch's timeout (a frozen rank 0, or a port of a different program that
accepts connections and does not answer). Therefore a thread makes these calls, and the main thread checks the time and
prints messages.
"""

import itertools
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from paceline.errors import TrainingError, UsageError
from paceline.host.procfs import describe_port_owner
from paceline.host.tcp import why_unreachable
from paceline.protocol.control import WorkerSpec, restart_count
from paceline.rank.environment import launcher_job_id

MEETING_SECONDS = 300.0
FIRST_NOTICE_SECONDS = 10.0
NOTICE_INTERVAL_SECONDS = 30.0
CONNECT_SECONDS = 10.0  # for one attempt of torch's client, which prints a lot when it fails
LONGEST_POLL_SECONDS = 0.25
PREFIX = "paceline/meeting"
# by port: kept to the end of the process, for ranks that begin their next group early
_hosted_stores: dict[int, Store] = {}
_rendezvous_numbers = itertools.count()  # a process may make several groups
COMPLETE, REFUSED, ARRIVED, JOB = "complete", "refused", "arrived", "job"
RANK_CLAIMED_TWICE = "rank-claimed-twice"


class _Job(msgspec.Struct, frozen=True):
    token: str
    size: int
    by: str  # the process that wrote this


@dataclass
class _Rendezvous:
    """The state of one rank's rendezvous. The thread writes `store` to `ended`, which the main thread reads."""

    rank: int
    size: int
    host: str
    port: int
    generation: str
    token: str
    deadline: float  # monotonic
    store: Store | None = None
    error: BaseException | None = None
    wait_message: str = ""  # a message for the user; empty if another rank prints it
    ended: threading.Event = field(default_factory=threading.Event)
    process_name: str = field(default_factory=lambda: f"{os.uname().nodename} pid {os.getpid()}")

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def is_overdue(self) -> bool:
        return time.monotonic() >= self.deadline


def rendezvous(rank: int, size: int, env: Mapping[str, str], *, seconds: float = MEETING_SECONDS) -> Store:
    """Wait until exactly the `size` ranks of this job have connected to its store.

    The store is memory from our agent for the ranks of one host (no other user can access it), else the store at
    MASTER_ADDR:MASTER_PORT. After 10 s, and then every 30 s, a message lists the missing ranks or the problem.

    The result has a prefix that is new for every restart. Without a prefix, a restarted group would read the addresses
    of the previous group from a store that still exists.
    """
    if not re.fullmatch("[0-9]{1,5}", env["MASTER_PORT"]):
        raise UsageError(code="master-port-invalid", value=env["MASTER_PORT"])
    start, number = time.monotonic(), next(_rendezvous_numbers)
    generation = f"{restart_count(env)}-{number}" if number else str(restart_count(env))
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    meeting = _Rendezvous(rank, size, host, port, generation, launcher_job_id(env), start + seconds)
    threading.Thread(target=_run, args=(meeting, env), daemon=True, name="paceline-meeting").start()
    next_message = start + FIRST_NOTICE_SECONDS
    while not meeting.ended.wait(max(0.0, min(next_message, meeting.deadline) - time.monotonic())):
        if meeting.is_overdue():
            meeting.ended.wait(2 * LONGEST_POLL_SECONDS)  # the thread also times out, and may have a better reason
            break
        next_message += NOTICE_INTERVAL_SECONDS
        if meeting.wait_message:
            seconds = time.monotonic() - start
            print(f"paceline: after {seconds:.0f} s {meeting.wait_message}", file=sys.stderr, flush=True)
    if meeting.error is not None:
        raise meeting.error
    if meeting.store is None:
        waits_for = meeting.wait_message or f"rank {rank} waits for ranks that a lower rank reports"
        raise TrainingError(code="ranks-did-not-meet", size=size, seconds=seconds, waits_for=waits_for)
    return PrefixStore(f"paceline/generation-{generation}", meeting.store)


def _run(meeting: _Rendezvous, env: Mapping[str, str]) -> None:
    try:
        if (store := _open(meeting, env)) is not None:
            keys = PrefixStore(f"{PREFIX}/generation-{meeting.generation}", store)
            _check_same_job(meeting, store, keys)
            _claim(meeting, keys)
            if _wait_for_all(meeting, keys):
                meeting.store = store
    except BaseException as error:  # raised by the main thread
        meeting.error = error
    meeting.ended.set()


def _open(meeting: _Rendezvous, env: Mapping[str, str]) -> Store | None:
    agent_hosts_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # started by torchrun
    inherited = -1 if (spec := WorkerSpec.from_environment()) is None else spec.store
    if inherited >= 0 and stat.S_ISREG(os.fstat(inherited).st_mode):
        # opened again at each call, so that its locks work between processes; -1: torch must not remove the file
        return FileStore(f"/proc/self/fd/{inherited}", -1)
    if meeting.rank == 0 and not agent_hosts_store:
        return _host_store(meeting, inherited)
    while not meeting.is_overdue():
        reason = why_unreachable(meeting.host, meeting.port)
        if not reason:
            meeting.wait_message = (
                f"rank {meeting.rank} on {os.uname().nodename} has connected to {meeting.address}, but no store "
                "answers: rank 0 is still starting, is frozen, or another program uses that port"
            )
            try:
                return _tcp_store(meeting, is_master=False)
            except dist.DistError as error:
                if not (spec and meeting.host == "127.0.0.1"):  # else our agent answers in place of a remote store
                    why = str(error).partition("\n")[0]
                    raise UsageError(code="not-our-store", where=meeting.address, why=why) from error
                reason = f"{meeting.address}: our agent there cannot reach the store"
        meeting.wait_message = f"rank {meeting.rank} on {os.uname().nodename} cannot reach rank 0 at {reason}"
        time.sleep(LONGEST_POLL_SECONDS)
    return None


def _host_store(meeting: _Rendezvous, inherited: int) -> Store:
    try:
        # if the agent has bound the port already, no other process can take it
        store = _tcp_store(meeting, is_master=True, listen_fd=inherited if inherited >= 0 else None)
        return _hosted_stores.setdefault(meeting.port, store)
    except dist.DistError as error:
        if "failed to listen" not in str(error):
            raise
        holder = describe_port_owner(meeting.port) or "another process"
        raise UsageError(code="master-port-taken", where=meeting.address, by=holder) from error


def _tcp_store(meeting: _Rendezvous, *, is_master: bool, listen_fd: int | None = None) -> Store:
    return TCPStore(  # multi_tenant: all stores of this process on one port have one server
        meeting.host, meeting.port, meeting.size, is_master, timedelta(seconds=CONNECT_SECONDS), wait_for_workers=False,
        multi_tenant=is_master, master_listen_fd=listen_fd,
    )  # fmt: skip


def _check_same_job(meeting: _Rendezvous, store: Store, keys: Store) -> None:
    """Check that the other ranks belong to this job. The later rank raises the error, and the others continue."""
    ours = _Job(meeting.token, meeting.size, meeting.process_name)
    first = _first_entry(meeting, PrefixStore(PREFIX, store), ours)
    if first.token == ours.token:  # sizes are compared only within a generation: a restart may have fewer ranks
        first = _first_entry(meeting, keys, ours)
    if (first.token, first.size) != (ours.token, ours.size):
        other, job = (entry.token or "without a name" for entry in (first, ours))
        raise UsageError(
            code="another-job-answers", where=meeting.address, by=first.by,
            other=other, other_size=first.size, job=job, size=ours.size,
        )  # fmt: skip


def _first_entry(meeting: _Rendezvous, keys: Store, ours: _Job) -> _Job:
    entry = keys.compare_set(JOB, "", msgspec.json.encode(ours).decode())
    try:
        return msgspec.json.decode(entry, type=_Job)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        why = f"{JOB!r} has an unknown format: {error}"
        raise UsageError(code="not-our-store", where=meeting.address, why=why) from None


def _claim(meeting: _Rendezvous, keys: Store) -> None:
    holder = keys.compare_set(str(meeting.rank), "", meeting.process_name).decode()
    if holder == meeting.process_name:
        if keys.add(ARRIVED, 1) == meeting.size:
            keys.set(COMPLETE, "")
        return
    fields: dict[str, Any] = {"where": meeting.address, "rank": meeting.rank, "size": meeting.size}
    fields |= {"first": holder, "second": meeting.process_name}
    if meeting.token:  # in the same job, another rank must then be missing, and all would wait for it until the timeout
        keys.set(REFUSED, msgspec.json.encode(fields).decode())
    raise UsageError(code=RANK_CLAIMED_TWICE, **fields)


def _wait_for_all(meeting: _Rendezvous, keys: Store) -> bool:
    pause_seconds, next_look = 0.002, time.monotonic() + FIRST_NOTICE_SECONDS / 2
    meeting.wait_message = ""
    while not keys.check([COMPLETE]):
        if keys.check([REFUSED]):
            fields = msgspec.json.decode(keys.get(REFUSED), type=dict[str, Any])
            time.sleep(0.0 if meeting.rank else 4 * LONGEST_POLL_SECONDS)  # rank 0 keeps the store until all have read
            raise UsageError(code=RANK_CLAIMED_TWICE, **fields)
        is_last = meeting.is_overdue()
        if is_last or time.monotonic() >= next_look:
            meeting.wait_message = _describe_missing_ranks(meeting, lambda rank: keys.check([str(rank)]))
            next_look = time.monotonic() + FIRST_NOTICE_SECONDS / 2
        if is_last:
            return False
        time.sleep(pause_seconds)
        pause_seconds = min(LONGEST_POLL_SECONDS, pause_seconds * 1.5)
    return True


def _describe_missing_ranks(meeting: _Rendezvous, has_come: Callable[[int], bool]) -> str:
    if any(has_come(rank) for rank in range(meeting.rank)):
        return ""
    absent = [n for n in range(meeting.size) if n < meeting.rank or (n > meeting.rank and not has_come(n))]
    names = ", ".join(map(str, absent[:20])) + ", ..." * (len(absent) > 20)
    return f"{len(absent)} of {meeting.size} ranks have not connected to {meeting.address}: rank {names}"
