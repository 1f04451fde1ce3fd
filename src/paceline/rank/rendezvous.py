"""Lets the ranks of one job find each other, without strangers and without a silent wait.

First all ranks compare, in their store, the name of the job and the size of the world; and each claims its rank.
Otherwise two jobs on one port would merge silently into one, and a RANK that was exported once for all would look like
a hang. Store calls may block forever (a frozen rank 0, a port of another program that accepts and does not answer),
despite torch's timeout: so a thread makes them, and the main thread keeps the time and prints messages.
"""

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
from paceline.host.procfs import port_holder
from paceline.host.reach import why_unreachable
from paceline.protocol.control import WorkerSpec, restarts
from paceline.rank.environment import job_token

MEETING_SECONDS = 300.0
FIRST_WORD_SECONDS = 10.0
NEXT_WORD_SECONDS = 30.0
CONNECT_SECONDS = 10.0  # for one try of torch's client, which is noisy when it fails
LONGEST_POLL_SECONDS = 0.25
PREFIX = "paceline/meeting"
_met: list[int] = []  # how often this process has met the others, once it has: a group may follow another
COMPLETE, REFUSED, ARRIVED, JOB = "complete", "refused", "arrived", "job"
CLAIMED_TWICE = "rank-claimed-twice"


class _Job(msgspec.Struct, frozen=True):
    token: str
    size: int
    by: str  # which process wrote this


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
    waits_for: str = ""  # a sentence for people; empty: somebody else says it
    ended: threading.Event = field(default_factory=threading.Event)
    me: str = field(default_factory=lambda: f"{os.uname().nodename} pid {os.getpid()}")

    @property
    def where(self) -> str:
        return f"{self.host}:{self.port}"

    def late(self) -> bool:
        return time.monotonic() >= self.deadline


def rendezvous(rank: int, size: int, env: Mapping[str, str], *, seconds: float = MEETING_SECONDS) -> Store:
    """The store of this job, when exactly its `size` ranks have connected to it.

    It is the memory that our agent has given to the ranks of one host (no other user can reach it), else at
    MASTER_ADDR:MASTER_PORT. After 10 s, and then every 30 s, a message names the missing ranks or the obstacle.

    Returns:
        The store, under a prefix that is new for every restart: without one a restarted group reads the dead group's
        addresses out of a store that survived it.

    Raises:
        UsageError: another job answers there, the port is taken, two processes claim one rank, or ranks disagree about
            the size of the world.
        TrainingError: not all have come within `seconds`.
    """
    if not re.fullmatch("[0-9]{1,5}", env["MASTER_PORT"]):
        raise UsageError(code="master-port-invalid", value=env["MASTER_PORT"])
    start, generation = time.monotonic(), "-".join(map(str, (restarts(env), *_met)))
    _met[:] = [sum(_met) + 1]
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    meeting = _Rendezvous(rank, size, host, port, generation, job_token(env), start + seconds)
    threading.Thread(target=_run, args=(meeting, env), daemon=True, name="paceline-meeting").start()
    next_word = start + FIRST_WORD_SECONDS
    while not meeting.ended.wait(max(0.0, min(next_word, meeting.deadline) - time.monotonic())):
        if meeting.late():
            meeting.ended.wait(2 * LONGEST_POLL_SECONDS)  # the thread sees it too, and may have a better reason
            break
        next_word += NEXT_WORD_SECONDS
        if meeting.waits_for:
            print(f"paceline: after {time.monotonic() - start:.0f} s {meeting.waits_for}", file=sys.stderr, flush=True)
    if meeting.error is not None:
        raise meeting.error
    if meeting.store is None:
        waits_for = meeting.waits_for or f"rank {rank} waits for others, which a lower rank names"
        raise TrainingError(code="ranks-did-not-meet", size=size, seconds=seconds, waits_for=waits_for)
    return PrefixStore(f"paceline/generation-{generation}", meeting.store)


def _run(meeting: _Rendezvous, env: Mapping[str, str]) -> None:
    try:
        store = _open(meeting, env)
        if store is not None:
            keys = PrefixStore(f"{PREFIX}/generation-{meeting.generation}", store)
            _compare(meeting, store, keys)
            _claim(meeting, keys)
            if _wait_for_all(meeting, keys):
                meeting.store = store
    except BaseException as error:  # raised by the main thread
        meeting.error = error
    meeting.ended.set()


def _open(meeting: _Rendezvous, env: Mapping[str, str]) -> Store | None:
    agent_hosts_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # started by torchrun
    inherited = -1 if (spec := WorkerSpec.here()) is None else spec.store
    if inherited >= 0 and stat.S_ISREG(os.fstat(inherited).st_mode):
        # opened again at each call, so that its locks hold between processes; -1: it has no name to be removed
        return FileStore(f"/proc/self/fd/{inherited}", -1)
    if meeting.rank == 0 and not agent_hosts_store:
        return _host(meeting, inherited)
    while not meeting.late():
        reason = why_unreachable(meeting.host, meeting.port)
        if not reason:
            meeting.waits_for = (
                f"rank {meeting.rank} on {os.uname().nodename} has connected to {meeting.where}, but no store answers "
                "there: rank 0 is still starting, is frozen, or another program has that port"
            )
            try:
                return _tcp_store(meeting, is_master=False)
            except dist.DistError as error:
                if not (spec and meeting.host == "127.0.0.1"):  # else our agent answers; the store is elsewhere
                    why = str(error).partition("\n")[0]
                    raise UsageError(code="not-our-store", where=meeting.where, why=why) from error
                reason = f"{meeting.where}, where our agent finds no way to its store"
        meeting.waits_for = f"rank {meeting.rank} on {os.uname().nodename} cannot reach rank 0 at {reason}"
        time.sleep(LONGEST_POLL_SECONDS)
    return None


def _host(meeting: _Rendezvous, inherited: int) -> Store:
    try:
        # where the agent has bound the port already, nobody can take it meanwhile
        return _tcp_store(meeting, is_master=True, listen_fd=inherited if inherited >= 0 else None)
    except dist.DistError as error:
        if "failed to listen" not in str(error):
            raise
        by = port_holder(meeting.port) or "another process"
        raise UsageError(code="master-port-taken", where=meeting.where, by=by) from error


def _tcp_store(meeting: _Rendezvous, *, is_master: bool, listen_fd: int | None = None) -> Store:
    timeout = timedelta(seconds=CONNECT_SECONDS)
    return TCPStore(
        meeting.host, meeting.port, meeting.size, is_master, timeout, wait_for_workers=False, master_listen_fd=listen_fd
    )


def _compare(meeting: _Rendezvous, store: Store, keys: Store) -> None:
    """Check that the others are of this job. The later rank gets the error, and the others continue."""
    mine = _Job(meeting.token, meeting.size, meeting.me)
    first = _first_word(meeting, PrefixStore(PREFIX, store), mine)
    if first.token == mine.token:  # the size only within a generation: after a restart there may be fewer
        first = _first_word(meeting, keys, mine)
    if (first.token, first.size) != (mine.token, mine.size):
        other, job = (one.token or "without a name" for one in (first, mine))
        raise UsageError(
            code="another-job-answers", where=meeting.where, by=first.by,
            other=other, other_size=first.size, job=job, size=mine.size,
        )  # fmt: skip


def _first_word(meeting: _Rendezvous, keys: Store, mine: _Job) -> _Job:
    """The first entry, perhaps of this process."""
    written = keys.compare_set(JOB, "", msgspec.json.encode(mine).decode())
    try:
        return msgspec.json.decode(written, type=_Job)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        why = f"{JOB!r} is not in our words: {error}"
        raise UsageError(code="not-our-store", where=meeting.where, why=why) from None


def _claim(meeting: _Rendezvous, keys: Store) -> None:
    """Take this rank, which no other process may have taken."""
    holder = keys.compare_set(str(meeting.rank), "", meeting.me).decode()
    if holder == meeting.me:
        if keys.add(ARRIVED, 1) == meeting.size:
            keys.set(COMPLETE, "")
        return
    fields: dict[str, Any] = {"where": meeting.where, "rank": meeting.rank, "size": meeting.size}
    fields |= {"first": holder, "second": meeting.me}
    if meeting.token:  # of this very job: another rank is missing then, and all would wait for it in vain
        keys.set(REFUSED, msgspec.json.encode(fields).decode())
    raise UsageError(code=CLAIMED_TWICE, **fields)


def _wait_for_all(meeting: _Rendezvous, keys: Store) -> bool:
    """Whether all have come before the time was over."""
    pause_seconds, next_look = 0.002, time.monotonic() + FIRST_WORD_SECONDS / 2
    meeting.waits_for = ""
    while not keys.check([COMPLETE]):
        if keys.check([REFUSED]):
            fields = msgspec.json.decode(keys.get(REFUSED), type=dict[str, Any])
            time.sleep(0.0 if meeting.rank else 4 * LONGEST_POLL_SECONDS)  # the store ends with rank 0: all shall read
            raise UsageError(code=CLAIMED_TWICE, **fields)
        last = meeting.late()
        if last or time.monotonic() >= next_look:
            meeting.waits_for = _missing(meeting, lambda rank: keys.check([str(rank)]))
            next_look = time.monotonic() + FIRST_WORD_SECONDS / 2
        if last:
            return False
        time.sleep(pause_seconds)
        pause_seconds = min(LONGEST_POLL_SECONDS, pause_seconds * 1.5)
    return True


def _missing(meeting: _Rendezvous, has_come: Callable[[int], bool]) -> str:
    """The missing ranks, as text; empty if a lower rank names them."""
    if any(has_come(rank) for rank in range(meeting.rank)):
        return ""
    absent = [n for n in range(meeting.size) if n < meeting.rank or (n > meeting.rank and not has_come(n))]
    names = ", ".join(map(str, absent[:20])) + ", ..." * (len(absent) > 20)
    return f"{len(absent)} of {meeting.size} ranks have not come to {meeting.where}: rank {names}"
