"""Memory that the ranks of one host share: how they find it, its content, and exchanging data without locks.

Each rank makes one memory file without a name. All ranks of the host map it. It needs no /dev/shm (64 MB in many
containers) and disappears with the last process that maps it. Its size is fixed; larger data passes through in pieces.

    offset       content
         0       the token of this rank, then one place for the token of each other rank (see `connect_memory`)
    next page    counters: one cache line for each channel and one for `left`; only this rank writes them
    next page    for each channel two slots: header (the call, absent gradients) and data

A rank writes only into its own memory. All ranks do the same ticks in the same order. Tick t is

    write    my slot t % 2
    publish  my counter becomes t
    wait     until every other counter is t or more
    read     the others' slots t % 2

No rank reads a slot that is half written, and no rank overwrites a slot that is still read:

- A rank stores its counter after its slot; a reader loads the counter before the slot. x86 keeps the stores of a
  processor in order, and its loads (TSO; string instructions may store in any order, but a later store is seen after
  them, and the C library ends streaming stores with a fence). A rank that sees t therefore sees the slot.
- Slot t % 2 is written again in tick t + 2. By then this rank has seen all others at t + 1, which they stored after
  they had read the slot of tick t: x86 never moves a load behind a later store.
- A counter is 8 aligned bytes, which CPython's memoryview of format Q stores and loads at once.
- No rank stores and then loads to decide which rank goes first (x86 may swap these two).
- If a rank computes with several threads, they are done before the call that started them returns, and x86's stores
  become visible to all processors in one order.

ARM and others may show a counter before its slot. Python cannot issue the instructions that prevent this, so there is
no shared memory on them: see `MACHINES`.

A waiting rank first spins for some tens of microseconds, the usual distance between ranks. Then it sleeps, longer the
longer it has waited, so that a wait costs little of a core and ends at most a few percent late. If there are more ranks
than cores, it yields between two looks and does not spin. On a core of its own it must not yield: the core may go to
another program for milliseconds.
"""

import fcntl
import mmap
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.torch_collectives import gather_over_torch
from paceline.errors import ExitCode, TrainingError
from paceline.host.cgroup import usable_cores
from paceline.host.procfs import read_process
from paceline.protocol.control import SHARED_MEMORY
from paceline.protocol.evidence import SHARED_GROUP, Op
from paceline.rank.guard import Guard

SPINS = 1000  # looks, of about 50 ns each
YIELD_SECONDS = 2e-4
SHORTEST_SLEEP_SECONDS = 2e-5
LONGEST_SLEEP_SECONDS = 1e-3
SLEEP_SHARE = 1 / 16  # of what has been waited so far

Look = Callable[[Callable[[], list[int]], float], None]
"""(returns the missing ranks, seconds waited so far): raises an error if the rank must not wait any longer"""

_TEXT_BYTES = 256
HEADER_BYTES = 4096
MAX_FLAGS = (HEADER_BYTES - _TEXT_BYTES) * 8
Slots = list[list[Tensor]]
"""[slot 0 or 1][rank]: (n,), the same memory"""


class Channel:
    """One stream of ticks among all ranks that share memory. Every rank makes the same ones in the same order."""

    def __init__(
        self,
        at: int,
        rank: int,
        counters: Sequence[memoryview],
        slots: Sequence[Sequence[memoryview]],
        look: Look,
        names: Sequence[int],
        spins: int,
    ) -> None:
        """A channel of rank number `rank` of those that share memory.

        Args:
            at: the index of this channel's word in each of `counters`.
            rank: of this process.
            counters: of each rank.
            slots: (2, ranks): header and data of each.
            look: see `Look`; it gets indices among the other ranks.
            names: the number of each rank in the world.
            spins: see `wait_for`.
        """
        self._at, self._rank, self._mine, self._names = at, rank, counters[rank], names
        self._others = [counter for number, counter in enumerate(counters) if number != rank]
        self._headers = [[slot[:HEADER_BYTES] for slot in of_tick] for of_tick in slots]
        self._data = [[slot[HEADER_BYTES:] for slot in of_tick] for of_tick in slots]
        self._typed: dict[torch.dtype, Slots] = {}
        self._look: Look = look
        self._announced = b""
        self.tick, self.spins = 0, spins
        self.data_bytes = len(self._data[0][0])

    def typed(self, dtype: torch.dtype) -> Slots:
        """The data of all slots, as elements of `dtype`."""
        if dtype not in self._typed:
            self._typed[dtype] = [[torch.frombuffer(data, dtype=dtype) for data in of_tick] for of_tick in self._data]
        return self._typed[dtype]

    def announce(self, text: bytes) -> None:
        """Name the call that begins with the next tick. If ranks name different ones, `wait` raises an error."""
        self._announced = text[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")

    def write(self) -> int:
        """Begin a tick; return the slot, 0 or 1, that may be written now."""
        wait_for(self._others, self._at, self.tick, self._look, spins=self.spins)  # no rank reads it any more
        slot = (self.tick + 1) & 1
        if self._announced:
            self._headers[slot][self._rank][:_TEXT_BYTES] = self._announced
        return slot

    def set_flags(self, slot: int, flags: int, count: int) -> None:
        """Write `count` bits, at most MAX_FLAGS, into the header of the slot."""
        size = (count + 7) // 8
        self._headers[slot][self._rank][_TEXT_BYTES : _TEXT_BYTES + size] = flags.to_bytes(size, "little")

    def publish(self) -> int:
        """Hand the slot over; return the number of this tick."""
        self.tick += 1
        self._mine[self._at] = self.tick
        return self.tick

    def wait(self) -> None:
        """Return when all ranks have published their slots.

        Raises:
            TrainingError: with MISMATCH, on every rank, if ranks have announced different calls.
            RuntimeError: a rank will not come; see `SharedMemory`.
        """
        wait_for(self._others, self._at, self.tick, self._look, spins=self.spins)
        if self._announced:
            mine, self._announced = self._announced, b""
            texts = [bytes(header[:_TEXT_BYTES]) for header in self._headers[self.tick & 1]]
            if any(text != mine for text in texts):
                calls = "; ".join(
                    f"rank {name} called {text.rstrip(bytes(1)).decode(errors='replace')}"
                    for name, text in zip(self._names, texts, strict=True)
                )
                where = " in shared memory"
                raise TrainingError(code="collectives-mismatch", exit_code=ExitCode.MISMATCH, where=where, calls=calls)

    def exchange(self) -> None:
        """Hand the slot over and wait for those of all ranks; see `publish` and `wait`."""
        self.publish()
        self.wait()

    def flags(self, count: int) -> list[int]:
        """The `count` bits that each rank has written in this tick."""
        size = (count + 7) // 8
        slots = self._headers[self.tick & 1]
        return [int.from_bytes(slot[_TEXT_BYTES : _TEXT_BYTES + size], "little") for slot in slots]

    def arrived(self, tick: int) -> bool:
        """Whether all ranks have published this tick."""
        return all(counter[self._at] >= tick for counter in self._others)


def wait_for(lines: Sequence[memoryview], at: int, value: int, look: Look, *, spins: int = SPINS) -> None:
    """Return when word `at` of each of `lines` is `value` or more.

    Args:
        lines: of unsigned 64-bit words, one for each other process; only that process writes it, never a lower value.
        at: the index of the word.
        value: to be reached.
        look: called between two sleeps.
        spins: the number of looks without a pause; 0 if ranks share cores.
    """
    for line in lines:
        if line[at] < value:
            for _ in range(spins):
                if line[at] >= value:
                    break
            else:
                _wait_slowly(lines, at, value, look, 0.0 if spins else YIELD_SECONDS)
                return


def _wait_slowly(lines: Sequence[memoryview], at: int, value: int, look: Look, yield_seconds: float) -> None:
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
                look(missing, waited_seconds)
                time.sleep(min(LONGEST_SLEEP_SECONDS, max(SHORTEST_SLEEP_SECONDS, waited_seconds * SLEEP_SHARE)))


GROUP = SHARED_GROUP  # of all ranks of the world; see `hosts.group_name`
PAGE, LINE = 4096, 64
TOKEN_BYTES = 16
_SMALL_BYTES = 64 << 10
BULK_BYTES = 2 << 20  # the fastest of 1, 2, 4 and 8 MiB: two slots of two ranks stay in a core's cache
LIFE_SECONDS = 0.1  # between two checks whether an awaited process is alive


@dataclass(frozen=True)
class MemoryLayout:
    """The offsets in the memory of each of `ranks` ranks, in bytes."""

    ranks: int
    bulk_bytes: int = BULK_BYTES

    @property
    def channels(self) -> tuple[int, ...]:
        """The data bytes of each channel's slot: totals, bulk."""
        return _SMALL_BYTES, self.bulk_bytes

    @property
    def counters_at(self) -> int:
        """The next page after the tokens."""
        return -(-(TOKEN_BYTES * (1 + self.ranks)) // PAGE) * PAGE

    def slot(self, channel: int, number: int) -> tuple[int, int]:
        """The begin and end of slot 0 or 1 of a channel."""
        before = sum(2 * (HEADER_BYTES + size) for size in self.channels[:channel])
        size = HEADER_BYTES + self.channels[channel]
        start = self.counters_at + PAGE + before + number * size
        return start, start + size

    @property
    def total_bytes(self) -> int:
        """The size of one rank's memory."""
        return self.slot(len(self.channels) - 1, 1)[1]


@dataclass(frozen=True)
class MemoryPeer:
    """A rank that shares memory: its process, and the memory that it has made."""

    rank: int  # of the world
    pid: int
    start: int  # see `procfs.Process`
    memory: memoryview


@dataclass(frozen=True)
class MemoryCall:
    """One collective: for the hang guard, and as text for the other ranks."""

    op: Op
    text: bytes


class SharedMemory:
    """The memories of all ranks of a group on one host, mapped into this process. `rank` and `size` are the group's.

    A rank waits at most `timeout_seconds` for the others. It raises an error immediately if the hang guard frees it,
    and within a fraction of a second if an awaited rank has ended, or has left after an error of its own. After that
    this rank can send nothing any more.
    """

    def __init__(
        self,
        peers: Sequence[MemoryPeer],
        rank: int,
        layout: MemoryLayout,
        timeout_seconds: float,
        *,
        group: str = GROUP,
    ) -> None:
        """`rank` is the index of this rank in `peers`; `group` names them. GROUP: they are all ranks of the world."""
        self.rank, self.size, self.timeout_seconds = rank, len(peers), timeout_seconds
        self.running: Any = None  # the `StartedSum` whose result has not been read yet
        self._group, self._pid = group, os.getpid()
        self._others = [(index, peer) for index, peer in enumerate(peers) if index != rank]
        at = layout.counters_at
        counters = [peer.memory[at : at + PAGE].cast("Q") for peer in peers]
        self._left = [counter[len(layout.channels) * LINE // 8 :] for counter in counters]
        self._looked_seconds = 0.0
        self._ranks = tuple(peer.rank for peer in peers)
        self._call = self.describe_call("", "")
        spins = 0 if self.size > usable_cores() else SPINS

        def channel(number: int) -> Channel:
            slots = [[peer.memory[slice(*layout.slot(number, slot))] for peer in peers] for slot in (0, 1)]
            return Channel(number * LINE // 8, rank, counters, slots, self._look, self._ranks, spins)

        self.totals, self.bulk = map(channel, range(len(layout.channels)))

    def describe_call(self, kind: str, name: str, shape: str = "", dtype: torch.dtype | str = "") -> MemoryCall:
        """Describe a collective; repeated calls of it share one description."""
        op = Op(self._group, 0, kind, name, shape, str(dtype).removeprefix("torch."))
        return MemoryCall(op, f"{kind} '{name}' {shape} {op.dtype}".rstrip().encode())

    @contextmanager
    def operation(self, channel: Channel, call: MemoryCall, work: object = None) -> Generator[None]:
        """Around the ticks of one collective: the hang guard sees it, and all ranks must begin the same one.

        If the collective ends elsewhere, around the ticks that begin it; `work` then knows whether it is over.
        """
        if self._left[self.rank][0]:
            raise RuntimeError(
                f"{call.text.decode()}: this rank has left the shared memory, after an error or at the end"
            )
        self._call = call
        channel.announce(call.text)
        begun = Guard.of_process().ledger.begin_own(self, self._ranks, call.op, of_all=self._group == GROUP)
        try:
            yield
        except BaseException:
            self.leave()  # else the others would wait for the remaining ticks
            Guard.of_process().ledger.end_own(begun, failed=True)
            raise
        Guard.of_process().ledger.end_own(begun, work)

    def leave(self) -> None:
        """Tell all ranks that this one will not come any more; may be called again."""
        if os.getpid() == self._pid:  # not in a forked process
            self._left[self.rank][0] = 1

    def _look(self, missing: Callable[[], list[int]], waited_seconds: float) -> None:
        """Raise an error if this rank must not wait any longer."""
        if Guard.of_process().released():
            names = self._names(missing())
            raise RuntimeError(
                f"{self._call.text.decode()}: connection closed by peer: freed from the wait for {names}"
            )
        gone = [index for index in missing() if self._left[self._others[index][0]][0]]
        why = "has left"
        if not gone and time.monotonic() - self._looked_seconds > LIFE_SECONDS:
            gone = [index for index in missing() if not _lives(self._others[index][1])]
            why, self._looked_seconds = "has ended", time.monotonic()
        # a rank that published before it left is not missing: its earlier stores are seen earlier
        if gone and (gone := [index for index in missing() if index in gone]):
            raise RuntimeError(f"{self._call.text.decode()}: connection closed by peer: {self._names(gone)} {why}")
        if waited_seconds > self.timeout_seconds:
            raise RuntimeError(
                f"{self._call.text.decode()}: timed out waiting for {self._names(missing())}, not there after "
                f"{self.timeout_seconds:g} s (--timeout)"
            )

    def _names(self, indices: Sequence[int]) -> str:
        peers = [self._others[index][1] for index in indices]
        return ", ".join(f"rank {peer.rank} (pid {peer.pid})" for peer in peers)


def _lives(peer: MemoryPeer) -> bool:
    process = read_process(peer.pid)
    if process is not None:
        return process.runs and process.start == peer.start
    try:  # /proc needs a free descriptor, which this process may lack just now
        os.kill(peer.pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


MACHINES = ("x86_64", "AMD64", "i686")  # with the memory order that the protocol needs
ADD_SEALS, NO_SHRINKING = 1033, 0x2  # Linux's F_ADD_SEALS, F_SEAL_SHRINK: reading a shrunk file kills the process


class Refusal(Exception):  # noqa: N818 - no error: the ranks use torch.distributed
    """Why ranks do not share memory."""


@dataclass(frozen=True)
class Met:
    """The ranks of this rank's host, in order."""

    peers: list[MemoryPeer]
    host: int  # of this rank, from 0
    hosts: int


class _Meeting:
    """One rank's part of `connect_memory`."""

    def __init__(self, rank: int, layout: MemoryLayout) -> None:
        self._rank, self._layout = rank, layout
        self._token, self._descriptor, self._memory = secrets.token_bytes(TOKEN_BYTES), -1, memoryview(b"")
        self.peers: list[MemoryPeer] = []

    def offer(self, *, wanted: bool) -> dict[str, Any]:
        if not wanted or os.environ.get(SHARED_MEMORY, "auto") == "off":
            raise Refusal("switched off")
        if sys.platform != "linux" or platform.machine() not in MACHINES:
            raise Refusal(f"{platform.system()} on {platform.machine()} does not keep stores to memory in order")
        process = read_process(os.getpid())
        if process is None:
            raise Refusal("there is no /proc")
        self._descriptor = os.memfd_create(f"paceline-shared-{self._rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self._descriptor, 0, self._layout.total_bytes)  # fails now, not at the first write
        fcntl.fcntl(self._descriptor, ADD_SEALS, NO_SHRINKING)
        self._memory = _mapped(self._descriptor, self._layout)
        self._memory[:TOKEN_BYTES] = self._token
        place = {"host": host_key(), "pid": process.pid, "start": process.start}
        return place | {"descriptor": self._descriptor, "token": self._token.hex()}

    def visit(self, run: range, offers: list[dict[str, Any]]) -> None:
        """Map the memories of the other ranks, and leave this rank's token there."""
        for number in run:
            memory, offer = self._memory, offers[number]
            if number != self._rank:
                memory = _opened(offer, self._layout)
                if bytes(memory[:TOKEN_BYTES]) != bytes.fromhex(offer["token"]):
                    raise Refusal(f"what rank {number} has made is not what is found there")
                memory[_place(self._rank)] = self._token
            self.peers.append(MemoryPeer(number, offer["pid"], offer["start"], memory))

    def check_visits(self, run: range, offers: list[dict[str, Any]]) -> None:
        for number in run:
            if number != self._rank and bytes(self._memory[_place(number)]) != bytes.fromhex(offers[number]["token"]):
                raise Refusal(f"rank {number} has found other memory")

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self._descriptor >= 0:
            os.close(self._descriptor)


def connect_memory(rank: int, layout: MemoryLayout, *, wanted: bool = True) -> Met:
    """The memories of all ranks of this host (a collective over torch.distributed's default group).

    Ranks prove that they share memory; no environment variable is trusted. Each rank makes its memory and sends the
    others its process, descriptor and a random token. The ranks of its host open the memory through /proc, compare the
    token, and write their own token back. This fails between containers that do not see each other, and between users.
    After each part all ranks exchange whether it succeeded: either all of them share memory, or none.

    All hosts have the same number of ranks, and more than one.

    Args:
        rank: of this process.
        layout: of each memory, the same on every rank; its `ranks` are those of the world.
        wanted: whether this rank wants to share memory. All ranks must want to.

    Raises:
        Refusal: the same on all ranks.
    """
    mine = _Meeting(rank, layout)
    try:
        offers = _agreed(layout.ranks, lambda: mine.offer(wanted=wanted))
        runs = _runs([offer["host"] for offer in offers])
        host = next(number for number, run in enumerate(runs) if rank in run)
        _agreed(layout.ranks, lambda: mine.visit(runs[host], offers))
        _agreed(layout.ranks, lambda: mine.check_visits(runs[host], offers))
    finally:
        mine.close()
    return Met(mine.peers, host, len(runs))


def host_key() -> str:
    """A text that differs between hosts, and between containers that do not see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116


def _agreed(size: int, part: Callable[[], Any]) -> list[Any]:
    """The result of `part` on each rank.

    Raises:
        Refusal: if it failed on any rank; with the reason of the first one.
    """
    result, why = None, ""
    try:
        result = part()
    except Refusal as refusal:
        why = str(refusal)
    except Exception as error:  # a rank that fails must not leave the others waiting
        why = f"{type(error).__name__}: {error}"
    of_rank = gather_over_torch([result, why], size)
    for rank, (_, why) in enumerate(of_rank):
        if why:
            raise Refusal(f"rank {rank}: {why}")
    return [result for result, _ in of_rank]


def _runs(keys: list[str]) -> list[range]:
    """The ranks of each host. All ranks know all keys, so that all raise the same Refusal."""
    runs, hosts = runs_of_hosts(keys), len(set(keys))
    if hosts == len(keys):
        raise Refusal(f"the ranks are on {hosts} hosts")
    if not runs:
        raise Refusal(f"the ranks are on {hosts} hosts, and those of one host have no consecutive numbers")
    sizes = list(map(len, runs))
    if len(set(sizes)) > 1:
        raise Refusal(f"the {hosts} hosts have different numbers of ranks: {', '.join(map(str, sizes))}")
    return runs


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


def runs_of_hosts(keys: Sequence[str]) -> list[range]:
    """The ranks of each host, from the key of each rank's host; empty if the ranks of one key are not consecutive.

    runs_of_hosts(["a", "a", "b"]) == [range(0, 2), range(2, 3)]; runs_of_hosts(["a", "b", "a"]) == []
    """
    runs: list[range] = []
    for rank, key in enumerate(keys):
        if rank > 0 and key == keys[rank - 1]:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return runs if len(runs) == len(set(keys)) else []
