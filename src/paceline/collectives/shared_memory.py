"""Memory that the ranks of one host share: how they connect to it, its layout, and the exchange of data without locks.

Each rank creates one anonymous memory file, which all ranks of the host map. It needs no /dev/shm (64 MB in many
containers), and disappears with the last process that maps it. Its size is fixed: larger data is sent in pieces.

    offset       content
         0       the token of this rank, then one entry for the token of each other rank (see `connect_shared_memory`)
    next page    counters: one cache line for each channel and one for `left`; only this rank writes them
    next page    two slots for each channel: header (the call, absent gradients) and data

A rank writes only into the memory that it has created. All ranks do the same ticks in the same order. Tick t is

    write    my slot t % 2
    publish  my counter becomes t
    wait     until every other counter is t or more
    read     the others' slots t % 2

No rank reads a half-written slot, and no rank overwrites a slot that others still read:

- A rank stores its counter after its slot. A reader loads the counter before the slot. x86 keeps the order of the
  stores of a processor, and of its loads (TSO). String instructions may store in any order, but a later store becomes
  visible after them, and the C library ends streaming stores with a fence. A rank that sees t therefore sees the slot.
- Slot t % 2 is written again in tick t + 2. By then this rank has seen all others at t + 1. They stored that after they
  had read the slot of tick t: x86 never moves a load behind a later store.
- A counter is 8 aligned bytes. CPython's memoryview of format Q stores and loads them in one instruction.
- No rank stores and then loads to decide which rank is first (x86 may swap these two).
- If a rank computes with several threads, they end before the call that started them returns, and x86's stores become
  visible to all processors in one order.

ARM and others may show a counter before its slot. Python cannot issue the instructions that prevent this. Their ranks
therefore share no memory: see `SUPPORTED_ARCHITECTURES`.

A waiting rank first spins for some tens of microseconds, the usual delay between ranks. Then it sleeps, for a fraction
of the time that it has waited: a wait costs little CPU time and ends at most a few percent late. If there are more
ranks than cores, it yields after each poll and does not spin. A rank with a separate core must not yield: the kernel
may give the core to a different program for milliseconds.
"""

import fcntl
import mmap
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.sum_tree import round_up
from paceline.collectives.torch_collectives import all_gather_json
from paceline.errors import ExitCode, TrainingError
from paceline.host.cgroup import usable_cores
from paceline.host.procfs import read_process
from paceline.protocol.control import SHARED_MEMORY
from paceline.protocol.evidence import SHARED_GROUP, Op
from paceline.rank.guard import HangGuard

SPINS = 1000  # polls of about 50 ns each
YIELD_SECONDS = 2e-4
SHORTEST_SLEEP_SECONDS = 2e-5
LONGEST_SLEEP_SECONDS = 1e-3
SLEEP_FRACTION = 1 / 16  # of the time waited so far

CheckWait = Callable[[Callable[[], list[int]], float], None]
"""(a function that returns the missing ranks, as indices among the other ranks; seconds waited so far): raises an error
if the rank must stop waiting"""

_TEXT_BYTES = 256
HEADER_BYTES = 4096
MAX_FLAGS = (HEADER_BYTES - _TEXT_BYTES) * 8
Slots = list[list[Tensor]]
"""[slot 0 or 1][rank]: (n,), views of the memory"""


GROUP_NAME = SHARED_GROUP  # the name of a group of all ranks of the world; see `hosts.node_group_name`
PAGE, LINE = 4096, 64
NUM_CHANNELS = 2  # totals, bulk
TOKEN_BYTES = 16
_SMALL_BYTES = 64 << 10
BULK_BYTES = 2 << 20  # the fastest of 1, 2, 4 and 8 MiB: two slots of two ranks stay in a core's cache
ALIVE_CHECK_SECONDS = 0.1  # between checks whether an awaited process is alive


@dataclass(frozen=True)
class MemoryLayout:
    """The offsets in the memory of a rank, in bytes; `ranks` share memory."""

    ranks: int
    bulk_bytes: int = BULK_BYTES

    @property
    def counters_offset(self) -> int:
        """The first page after the tokens."""
        return round_up(TOKEN_BYTES * (1 + self.ranks), PAGE)

    @property
    def slots(self) -> list[slice]:
        """Slots 0 and 1 of the totals, then those of bulk data, to the end of the memory."""
        sizes = [HEADER_BYTES + data_bytes for data_bytes in (_SMALL_BYTES, self.bulk_bytes) for _ in range(2)]
        bounds = accumulate(sizes, initial=self.counters_offset + PAGE)
        return [slice(*pair) for pair in pairwise(bounds)]

    @property
    def total_bytes(self) -> int:
        return self.slots[-1].stop

    def counters(self, memory: memoryview) -> memoryview:
        return memory[self.counters_offset : self.counters_offset + PAGE].cast("Q")


@dataclass(frozen=True)
class MemoryPeer:
    """A rank that shares memory: its process, and the memory that it has created."""

    rank: int  # of the world
    pid: int
    process_start_time: int  # see `procfs.Process`
    memory: memoryview


class SharedMemoryChannel:
    """A sequence of ticks of all ranks that share memory. Every rank creates the same channels in the same order."""

    def __init__(
        self, number: int, peers: Sequence[MemoryPeer], rank: int, layout: MemoryLayout, check_wait: CheckWait
    ) -> None:
        """`number`: of the channel. `rank`: the index of this rank in `peers`."""
        counters = [layout.counters(peer.memory) for peer in peers]
        slots = [[peer.memory[part] for peer in peers] for part in layout.slots[2 * number : 2 * number + 2]]
        self._at, self._rank, self._mine = number * LINE // 8, rank, counters[rank]
        self._names = [peer.rank for peer in peers]
        self._others = [counter for number, counter in enumerate(counters) if number != rank]
        self._headers = [[slot[:HEADER_BYTES] for slot in of_tick] for of_tick in slots]
        self._data = [[slot[HEADER_BYTES:] for slot in of_tick] for of_tick in slots]
        self._typed: dict[torch.dtype, Slots] = {}
        self.view = lru_cache(4096)(self._view)  # each slice is a torch operation
        self._check_wait: CheckWait = check_wait
        self.call = b""
        """the header of the call that begins with the next tick. If ranks set different ones, `wait` raises an error"""
        self.tick = self._waited = 0  # `_waited`: the last tick that this rank has waited for
        self._spins = 0 if len(peers) > usable_cores() else SPINS
        self.data_bytes = len(self._data[0][0])

    @cached_property
    def floats(self) -> "list[list[memoryview[float]]]":
        """The data of all slots, as numbers."""
        return [[data.cast("d") for data in of_tick] for of_tick in self._data]

    def slots_as(self, dtype: torch.dtype) -> Slots:
        """The data of all slots, as elements of `dtype`."""
        if dtype not in self._typed:
            self._typed[dtype] = [[torch.frombuffer(data, dtype=dtype) for data in of_tick] for of_tick in self._data]
        return self._typed[dtype]

    def _view(self, dtype: torch.dtype, slot: int, rank: int, start: int, stop: int) -> Tensor:
        return self.slots_as(dtype)[slot][rank][start:stop]

    def begin_tick(self, flags: bytes = b"") -> int:
        """Begin a tick, with up to MAX_FLAGS bits in its header; return the slot, 0 or 1, that may be written now."""
        assert self._waited == self.tick  # so no rank reads the slot of the tick before it
        slot = (self.tick + 1) & 1
        header = self._headers[slot][self._rank]
        if self.call:
            header[:_TEXT_BYTES] = self.call
        header[_TEXT_BYTES : _TEXT_BYTES + len(flags)] = flags
        return slot

    def set_flags(self, slot: int, flags: bytes) -> None:
        """Write the flags of a tick that has begun."""
        self._headers[slot][self._rank][_TEXT_BYTES : _TEXT_BYTES + len(flags)] = flags

    def publish(self) -> int:
        """Make the slot visible to the other ranks; return the number of this tick."""
        self.tick += 1
        self._mine[self._at] = self.tick
        return self.tick

    def wait(self) -> None:
        """Return when all ranks have published their slots.

        Raises:
            TrainingError: with MISMATCH, on every rank, if ranks have set different calls.
            RuntimeError: a rank has ended, has left or is late; see `SharedMemoryGroup`.
        """
        at, tick = self._at, self.tick
        for line in self._others:
            if line[at] < tick:
                for _ in range(self._spins):
                    if line[at] >= tick:
                        break
                else:  # it sleeps until all ranks have published
                    _sleep_until(self._others, at, tick, self._check_wait, 0.0 if self._spins else YIELD_SECONDS)
        self._waited = tick
        if self.call:
            mine, self.call = self.call, b""
            headers = self._headers[self.tick & 1]
            for header in headers:
                if bytes(header[:_TEXT_BYTES]) != mine:
                    raise self._mismatch([bytes(header[:_TEXT_BYTES]) for header in headers])

    def _mismatch(self, texts: Sequence[bytes]) -> TrainingError:
        calls = "; ".join(
            f"rank {name} called {text.rstrip(bytes(1)).decode(errors='replace')}"
            for name, text in zip(self._names, texts, strict=True)
        )
        where = " in shared memory"
        return TrainingError(code="collectives-mismatch", exit_code=ExitCode.MISMATCH, where=where, calls=calls)

    def publish_and_wait(self) -> None:
        self.tick += 1
        self._mine[self._at] = self.tick
        self.wait()

    def flags(self, count: int) -> list[int]:
        """The `count` bits that each rank has written in this tick."""
        stop = _TEXT_BYTES + (count + 7) // 8
        return [int.from_bytes(header[_TEXT_BYTES:stop], "little") for header in self._headers[self.tick & 1]]

    def have_all_published(self, tick: int) -> bool:
        return all(counter[self._at] >= tick for counter in self._others)


def _sleep_until(lines: Sequence[memoryview], at: int, value: int, check_wait: CheckWait, yield_seconds: float) -> None:
    """Return when counter `at` of each of `lines` is `value` or more.

    A line holds unsigned 64-bit counters of another process, which only that process writes and which never fall.
    `check_wait` is called before each sleep.
    """

    def missing() -> list[int]:
        return [index for index, line in enumerate(lines) if line[at] < value]

    began = time.monotonic()
    while absent := missing():
        line = lines[absent[0]]
        while line[at] < value:
            waited_seconds = time.monotonic() - began
            if waited_seconds < yield_seconds:
                os.sched_yield()
            else:
                check_wait(missing, waited_seconds)
                time.sleep(min(LONGEST_SLEEP_SECONDS, max(SHORTEST_SLEEP_SECONDS, waited_seconds * SLEEP_FRACTION)))


class SharedMemoryGroup:
    """The memories of all ranks of a group on one host, mapped into this process. `rank` and `size` are of the group.

    A rank waits at most `timeout_seconds` for the others. It raises an error immediately if the hang guard unblocks it,
    and within a fraction of a second if an awaited rank has ended, or has left after an error. After such an error,
    this rank cannot send anything either.
    """

    def __init__(
        self, peers: Sequence[MemoryPeer], rank: int, layout: MemoryLayout, timeout_seconds: float, *,
        group: str = GROUP_NAME,
    ) -> None:  # fmt: skip
        """`rank` is the index of this rank in `peers`. `group` is their name; GROUP means all ranks of the world."""
        self.rank, self.size, self.timeout_seconds = rank, len(peers), timeout_seconds
        self.running: Any = None  # the `AsyncAllReduce` that has not been read yet
        self.group, self._pid = group, os.getpid()
        self._others = [(index, peer) for index, peer in enumerate(peers) if index != rank]
        self.left = [layout.counters(peer.memory)[NUM_CHANNELS * LINE // 8 :] for peer in peers]
        self._checked_seconds = 0.0
        self.ranks = tuple(peer.rank for peer in peers)
        self.guard = HangGuard.of_process()
        self.totals, self.bulk = (
            SharedMemoryChannel(number, peers, rank, layout, self._check_wait) for number in range(NUM_CHANNELS)
        )
        self.operation = lru_cache(256)(partial(CollectiveContext, self))
        self.current = self.operation("", "")
        """the last collective that has begun"""

    def mark_as_left(self) -> None:
        """Mark this rank as gone, so that waiting ranks raise an error. May be called more than once."""
        if os.getpid() == self._pid:  # not in a forked process
            self.left[self.rank][0] = 1

    def _check_wait(self, missing: Callable[[], list[int]], waited_seconds: float) -> None:
        if self.guard.release_reason():
            names = self._names(missing())
            raise RuntimeError(f"{self.current.text}: connection closed by peer: unblocked from the wait for {names}")
        gone = [index for index in missing() if self.left[self._others[index][0]][0]]
        why = "has left"
        if not gone and time.monotonic() - self._checked_seconds > ALIVE_CHECK_SECONDS:
            gone = [index for index in missing() if not _is_alive(self._others[index][1])]
            why, self._checked_seconds = "has ended", time.monotonic()
        # A rank that published before it left is not missing: its stores become visible in their order.
        if gone and (gone := [index for index in missing() if index in gone]):
            raise RuntimeError(f"{self.current.text}: connection closed by peer: {self._names(gone)} {why}")
        if waited_seconds > self.timeout_seconds:
            raise RuntimeError(
                f"{self.current.text}: timed out waiting for {self._names(missing())} after "
                f"{self.timeout_seconds:g} s (--timeout)"
            )

    def _names(self, indices: Sequence[int]) -> str:
        peers = [self._others[index][1] for index in indices]
        return ", ".join(f"rank {peer.rank} (pid {peer.pid})" for peer in peers)


class CollectiveContext:
    """A context for the ticks of one collective in shared memory. It can be entered again.

    For an asynchronous collective, it wraps the ticks that start it. `work` then reports whether it is completed.
    """

    def __init__(
        self, memory: SharedMemoryGroup, kind: str, name: str, shape: str = "", dtype: torch.dtype | str = "",
        *, channel: SharedMemoryChannel | None = None,
    ) -> None:  # fmt: skip
        """`channel`: by default that for bulk data."""
        self._memory, self._channel = memory, channel or memory.bulk
        self.work: object = None
        self._op = Op(memory.group, 0, kind, name, shape, str(dtype).removeprefix("torch."))
        self.text = f"{kind} '{name}' {shape} {self._op.dtype}".rstrip()
        self._header = self.text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")

    def __enter__(self) -> None:
        memory = self._memory
        if memory.left[memory.rank][0]:
            raise RuntimeError(f"{self.text}: this rank has left the shared memory after an error or at its end")
        memory.current, self._channel.call = self, self._header  # the channel compares it between ranks
        of_all = memory.group == GROUP_NAME
        self._begun = memory.guard.ledger.begin_internal_op(memory, memory.ranks, self._op, of_all=of_all)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        work, self.work = self.work, None
        if kind is not None:
            self._memory.mark_as_left()  # otherwise the others would wait for the remaining ticks
        self._memory.guard.ledger.end_internal_op(self._begun, None if kind else work, failed=kind is not None)


def _is_alive(peer: MemoryPeer) -> bool:
    process = read_process(peer.pid)
    if process is not None:
        return process.runs and process.start_ticks == peer.process_start_time
    try:  # /proc needs a free descriptor, and this process may have none
        os.kill(peer.pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


SUPPORTED_ARCHITECTURES = ("x86_64", "AMD64", "i686")  # their memory order is that of the protocol
ADD_SEALS, NO_SHRINKING = 1033, 0x2  # Linux's F_ADD_SEALS, F_SEAL_SHRINK: reading a shrunk file kills the process


class SharedMemoryUnavailable(Exception):  # noqa: N818 - not an error: the ranks use torch.distributed
    """The reason why ranks do not share memory."""


@dataclass(frozen=True)
class NodeMembers:
    """The ranks of this rank's host, in order."""

    peers: list[MemoryPeer]
    node_index: int  # of this rank, from 0
    node_count: int


class _Handshake:
    def __init__(self, rank: int, layout: MemoryLayout) -> None:
        self._rank, self._layout = rank, layout
        self._token, self._descriptor, self._memory = secrets.token_bytes(TOKEN_BYTES), -1, memoryview(b"")
        self.peers: list[MemoryPeer] = []

    def offer(self, *, wanted: bool) -> dict[str, Any]:
        if not wanted or os.environ.get(SHARED_MEMORY, "auto") == "off":
            raise SharedMemoryUnavailable("switched off")
        if sys.platform != "linux" or platform.machine() not in SUPPORTED_ARCHITECTURES:
            machine = f"{platform.system()} on {platform.machine()}"
            raise SharedMemoryUnavailable(f"{machine} does not keep stores to memory in order")
        process = read_process(os.getpid())
        if process is None:
            raise SharedMemoryUnavailable("/proc is missing")
        self._descriptor = os.memfd_create(f"paceline-shared-{self._rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self._descriptor, 0, self._layout.total_bytes)  # fails now, not at the first write
        fcntl.fcntl(self._descriptor, ADD_SEALS, NO_SHRINKING)
        self._memory = _map(self._descriptor, self._layout)
        self._memory[:TOKEN_BYTES] = self._token
        location = {"host": node_key(), "pid": process.pid, "start": process.start_ticks}
        return location | {"descriptor": self._descriptor, "token": self._token.hex()}

    def open_peers(self, ranks: range, offers: list[dict[str, Any]]) -> None:
        """Map the memories of the other ranks, and write this rank's token there."""
        for rank in ranks:
            memory, offer = self._memory, offers[rank]
            if rank != self._rank:
                memory = _open(offer, self._layout)
                if bytes(memory[:TOKEN_BYTES]) != bytes.fromhex(offer["token"]):
                    process = f"process {offer['pid']}"
                    raise SharedMemoryUnavailable(f"the memory of {process} does not have the token of rank {rank}")
                memory[_token_slice(self._rank)] = self._token
            self.peers.append(MemoryPeer(rank, offer["pid"], offer["start"], memory))

    def check_tokens(self, ranks: range, offers: list[dict[str, Any]]) -> None:
        for rank in ranks:
            if rank != self._rank and bytes(self._memory[_token_slice(rank)]) != bytes.fromhex(offers[rank]["token"]):
                raise SharedMemoryUnavailable(f"rank {rank} has opened different memory")

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self._descriptor >= 0:
            os.close(self._descriptor)


def connect_shared_memory(rank: int, layout: MemoryLayout, *, wanted: bool = True) -> NodeMembers:
    """Map the memories of all ranks of this host (a collective over torch.distributed's default group).

    Ranks test whether they share memory, and trust no environment variable. Each rank creates its memory, and sends the
    others its pid, descriptor and a random token. The ranks of its host open the memory through /proc, compare the
    token, and write their tokens back. This fails between containers that cannot see each other, and between users.
    After each phase, all ranks exchange whether it succeeded: either all of them share memory, or none.

    All hosts must have the same number of ranks, and more than one. All ranks must have `wanted` to share memory.

    Raises:
        SharedMemoryUnavailable: the same on all ranks.
    """
    handshake = _Handshake(rank, layout)
    try:
        offers = _run_on_all(layout.ranks, lambda: handshake.offer(wanted=wanted))
        hosts = _ranks_of_hosts([offer["host"] for offer in offers])
        host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
        _run_on_all(layout.ranks, lambda: handshake.open_peers(hosts[host], offers))
        _run_on_all(layout.ranks, lambda: handshake.check_tokens(hosts[host], offers))
    finally:
        handshake.close()
    return NodeMembers(handshake.peers, host, len(hosts))


def node_key() -> str:
    """A text that differs between hosts, and between containers that cannot see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116


def _run_on_all(size: int, phase: Callable[[], Any]) -> list[Any]:
    """The result of `phase` on each rank. If it failed on any rank, all raise the reason of the first one."""
    result, why = None, ""
    try:
        result = phase()
    except SharedMemoryUnavailable as refusal:
        why = str(refusal)
    except Exception as error:  # the other ranks wait for the result of a failed rank
        why = f"{type(error).__name__}: {error}"
    outcomes = all_gather_json([result, why], size)
    for rank, (_, why) in enumerate(outcomes):
        if why:
            raise SharedMemoryUnavailable(f"rank {rank}: {why}")
    return [result for result, _ in outcomes]


def _ranks_of_hosts(keys: list[str]) -> list[range]:
    runs, hosts = consecutive_ranks_by_node(keys), len(set(keys))
    if hosts == len(keys):
        raise SharedMemoryUnavailable(f"the ranks are on {hosts} nodes")
    if not runs:
        raise SharedMemoryUnavailable(f"the ranks are on {hosts} nodes, and the ranks of one node are not consecutive")
    sizes = list(map(len, runs))
    if len(set(sizes)) > 1:
        raise SharedMemoryUnavailable(
            f"the {hosts} nodes have different numbers of ranks: {', '.join(map(str, sizes))}"
        )
    return runs


def _token_slice(rank: int) -> slice:
    return slice(TOKEN_BYTES * (1 + rank), TOKEN_BYTES * (2 + rank))


def _open(offer: dict[str, Any], layout: MemoryLayout) -> memoryview:
    descriptor = os.open(f"/proc/{offer['pid']}/fd/{offer['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != layout.total_bytes:
            raise SharedMemoryUnavailable(f"the memory of process {offer['pid']} has a different size")
        return _map(descriptor, layout)
    finally:
        with suppress(OSError):
            os.close(descriptor)


def _map(descriptor: int, layout: MemoryLayout) -> memoryview:
    return memoryview(mmap.mmap(descriptor, layout.total_bytes))


def consecutive_ranks_by_node(keys: Sequence[str]) -> list[range]:
    """The ranks of each host, from the key of each rank's host; empty if the ranks of one key are not consecutive.

    consecutive_ranks_by_node(["a", "a", "b"]) == [range(0, 2), range(2, 3)]; of ["a", "b", "a"] it is []
    """
    runs: list[range] = []
    for rank, key in enumerate(keys):
        if rank > 0 and key == keys[rank - 1]:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return runs if len(runs) == len(set(keys)) else []
