"""Which ranks share one host's memory: proven by memory, not believed from a number in the environment.

Each rank makes its memory and tells the others how to find it (process, descriptor, a random token); those of the same
host open it through /proc, read the token there, and write their own token back into their place. Ranks of containers
that do not see each other, or of other users, fail somewhere on that way. After each part all ranks tell whether it
went well, so that all of them use shared memory, each with the ranks of its host, or none.
"""

import fcntl
import mmap
import os
import platform
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.variables import SHARED_MEMORY
from paceline.host.procfs import read_process
from paceline.sums.gather import gather_over_torch
from paceline.sums.hosts import runs_of_hosts
from paceline.sums.shared import TOKEN_BYTES, MemoryLayout, MemoryPeer

MACHINES = ("x86_64", "AMD64", "i686")  # whose memory order makes it right: see `channel`
ADD_SEALS, NO_SHRINKING = 1033, 0x2  # Linux's F_ADD_SEALS, F_SEAL_SHRINK: a file cut short would kill who maps it


class Refusal(Exception):  # noqa: N818 - no error: the other way is as good
    """Why ranks do not share memory."""


@dataclass(frozen=True)
class Met:
    """Who shares memory with this rank: the ranks of its host, in order."""

    peers: list[MemoryPeer]
    host: int  # of this rank, from 0
    hosts: int


@dataclass
class _Mine:
    """What this rank brings along."""

    layout: MemoryLayout
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES))
    descriptor: int = -1
    memory: memoryview = field(default_factory=lambda: memoryview(b""))
    peers: list[MemoryPeer] = field(default_factory=list[MemoryPeer])


def meet_in_memory(rank: int, layout: MemoryLayout, *, wanted: bool = True) -> Met:
    """The memories of all ranks of this host (a collective over torch.distributed's default group).

    All hosts have equally many ranks, and more than one.

    Args:
        rank: of this process.
        layout: of each memory, the same on every rank; its `ranks` are those of the world.
        wanted: whether this rank would like to; if one does not, nobody will.

    Raises:
        Refusal: on all ranks alike.
    """
    mine = _Mine(layout)
    try:
        offers = _agreed(layout.ranks, lambda: _offer(mine, rank, wanted=wanted))
        runs = _runs([offer["host"] for offer in offers])
        host = next(number for number, run in enumerate(runs) if rank in run)
        _agreed(layout.ranks, lambda: _visit(mine, rank, runs[host], offers))
        _agreed(layout.ranks, lambda: _check_visits(mine, rank, runs[host], offers))
    finally:
        if mine.descriptor >= 0:
            os.close(mine.descriptor)  # what is mapped stays
    return Met(mine.peers, host, len(runs))


def host_key() -> str:
    """What differs between two hosts, and between containers that do not see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116


def _agreed(size: int, part: Callable[[], Any]) -> list[Any]:
    """What `part` gave on each rank.

    Raises:
        Refusal: if it failed on any rank; in the words of the first.
    """
    given, why = None, ""
    try:
        given = part()
    except Refusal as refusal:
        why = str(refusal)
    except Exception as error:  # a rank that fails must not leave the others waiting
        why = f"{type(error).__name__}: {error}"
    told = gather_over_torch({"given": given, "why": why}, size)
    for rank, one in enumerate(told):
        if one["why"]:
            raise Refusal(f"rank {rank}: {one['why']}")
    return [one["given"] for one in told]


def _offer(mine: _Mine, rank: int, *, wanted: bool) -> dict[str, Any]:
    if not wanted or os.environ.get(SHARED_MEMORY, "auto") == "off":
        raise Refusal("switched off")
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise Refusal(f"{platform.system()} on {platform.machine()} does not keep stores to memory in order")
    process = read_process(os.getpid())
    if process is None:
        raise Refusal("there is no /proc")
    mine.descriptor = os.memfd_create(f"paceline-shared-{rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(mine.descriptor, 0, mine.layout.total_bytes)  # what is missing is missing now
    fcntl.fcntl(mine.descriptor, ADD_SEALS, NO_SHRINKING)
    mine.memory = _mapped(mine.descriptor, mine.layout)
    mine.memory[:TOKEN_BYTES] = mine.token
    return {
        "host": host_key(), "name": os.uname().nodename, "pid": process.pid, "start": process.start,
        "descriptor": mine.descriptor, "token": mine.token.hex(),
    }  # fmt: skip


def _runs(keys: list[str]) -> list[range]:
    """The ranks of each host; all ranks know all keys, so that all refuse."""
    runs, hosts = runs_of_hosts(keys), len(set(keys))
    if hosts == len(keys):
        raise Refusal(f"the ranks are on {hosts} hosts")
    sizes = [len(run) for run in runs]
    if not runs:
        raise Refusal(f"the ranks are on {hosts} hosts, and those of one host have no consecutive numbers")
    if len(set(sizes)) > 1:
        raise Refusal(f"the {hosts} hosts have different numbers of ranks: {', '.join(map(str, sizes))}")
    return runs


def _visit(mine: _Mine, rank: int, run: range, offers: list[dict[str, Any]]) -> None:
    for number in run:
        memory, offer = mine.memory, offers[number]
        if number != rank:
            memory = _opened(offer, mine.layout)
            if bytes(memory[:TOKEN_BYTES]) != bytes.fromhex(offer["token"]):
                raise Refusal(f"what rank {number} has made is not what is found there")
            memory[_place(rank)] = mine.token
        mine.peers.append(MemoryPeer(number, offer["pid"], offer["start"], memory))


def _check_visits(mine: _Mine, rank: int, run: range, offers: list[dict[str, Any]]) -> None:
    for number in run:
        if number != rank and bytes(mine.memory[_place(number)]) != bytes.fromhex(offers[number]["token"]):
            raise Refusal(f"rank {number} has found other memory")


def _place(rank: int) -> slice:
    return slice(TOKEN_BYTES * (1 + rank), TOKEN_BYTES * (2 + rank))


def _opened(offer: dict[str, Any], layout: MemoryLayout) -> memoryview:
    descriptor = os.open(f"/proc/{offer['pid']}/fd/{offer['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != layout.total_bytes:
            raise Refusal(f"the memory of process {offer['pid']} has another size")
        return _mapped(descriptor, layout)
    finally:
        with suppress(OSError):
            os.close(descriptor)


def _mapped(descriptor: int, layout: MemoryLayout) -> memoryview:
    return memoryview(mmap.mmap(descriptor, layout.total_bytes))
