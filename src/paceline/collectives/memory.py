"""Memory that the ranks of a host share: how they find it, what it contains, and how they use it.

Processes hand memory to each other, over and over, without any lock.

Every rank writes only into its own memory, which has two slots and one counter for each channel. All ranks do the same
ticks in the same order; tick t is

    write    my slot t % 2
    publish  my counter becomes t
    wait     until every other counter is t or more
    read     the others' slots t % 2

and whatever is sent is made of ticks. Why nobody reads what is half written, and nobody writes what is still read:

- A counter is stored after its slot, and loaded before it. x86 keeps the stores of a processor in order, and its loads
  (TSO; string instructions may store in any order, but what is stored after them is seen after them, and the C library
  ends streaming stores with a fence): who sees t sees the slot.
- Slot t % 2 is written again in tick t + 2. By then I have seen all others at t + 1, which they stored after they had
  read my slot of tick t: x86 never moves a load behind a later store.
- A word is 8 aligned bytes, which CPython's memoryview of format Q stores and loads at once.
- No rank ever stores and then loads what decides who goes first (x86 may swap these two): there is no such race here.
- Where a rank computes with several threads, these are done before the call that started them returns, and x86's
  stores become visible to all processors in one order.

A waiting rank looks without a pause for some tens of microseconds, which is what ranks in step are apart. Then it
sleeps, longer the longer it has waited, so that a wait costs little of a core and ends at most a few percent late.
Where there are more ranks than cores, looking would only keep the awaited one waiting: there it lets others run between
two looks. That is nothing for a core of its own: a process that yields to a stranger's is back after milliseconds, one
that has slept at once.

ARM and others may show a counter before its slot. They have instructions against that, which Python cannot issue; a
lock's own would do by accident of its implementation. So there is no shared memory on them: see `MACHINES`.

What the ranks of one host share: memory that each of them has made, and all of them have mapped.

A rank's memory is a file without a name: it needs no /dev/shm (64 MB in many containers), and is gone with the last
process that maps it. Its size is fixed; whatever is sent passes through it in pieces (see `Channel`).

    offset       what
         0       this rank's token, then one place for the token of each other rank (see `meet_in_memory`)
    page-wise    counters, one cache line for each channel and one for `left`; written by this rank alone
    then         for each channel two slots: header (what it is, absent gradients) and data

For other parts (all ranks that share it call the same ones in the same order; tensors are on the CPU):

    memory = choose().memory                          # None: not all ranks are on one host; then use torch.distributed
    reduce_scatter(memory, own, forest, out, divisor) # own: (n,) for each of my subtrees, or None; out: (n / W,), mine
    all_gather(memory, mine, out)                     # mine: (n / W,), out: (n,)
    broadcast_in_memory(memory, tensors, src=0); barrier(memory)
    TreeSum(memory, sizes, dtypes, forest).run(nodes, divisor)   # the sum of lists of tensors, in place

Which ranks share one host's memory: proven by memory, not believed from a number in the environment.

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
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
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
"""(who is missing just now, seconds waited so far): raises where there is no point in waiting any longer"""

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
    ) -> None:
        """The channel whose counters stand at word `at`.

        Args:
            at: which word of each of `counters` is this channel's.
            rank: whose memory is our own, among those who share memory.
            counters: of each rank.
            slots: (2, ranks): header and data of each.
            look: see `Look`; it is given indices among the other ranks.
            names: what each rank is called in the world.
        """
        self._at, self._rank, self._mine, self._names = at, rank, counters[rank], names
        self._others = [counter for number, counter in enumerate(counters) if number != rank]
        self._headers = [[slot[:HEADER_BYTES] for slot in of_tick] for of_tick in slots]
        self._data = [[slot[HEADER_BYTES:] for slot in of_tick] for of_tick in slots]
        self._typed: dict[torch.dtype, Slots] = {}
        self._look: Look = look
        self._announced = b""
        self.tick = 0
        self.spins = 0
        self.data_bytes = len(self._data[0][0])

    def typed(self, dtype: torch.dtype) -> Slots:
        """The data of all slots, as elements of `dtype`."""
        if dtype not in self._typed:
            self._typed[dtype] = [[torch.frombuffer(data, dtype=dtype) for data in of_tick] for of_tick in self._data]
        return self._typed[dtype]

    def announce(self, text: bytes) -> None:
        """What begins with the next tick: the same words on all ranks, or `wait` raises."""
        self._announced = text[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")

    def write(self) -> int:
        """Begin a tick: which slot, 0 or 1, may be written now."""
        wait_for(self._others, self._at, self.tick, self._look, spins=self.spins)  # nobody reads it any more
        slot = (self.tick + 1) & 1
        if self._announced:
            self._headers[slot][self._rank][:_TEXT_BYTES] = self._announced
        return slot

    def set_flags(self, slot: int, flags: int, count: int) -> None:
        """Write `count` bits, at most MAX_FLAGS, beside the data of the slot."""
        size = (count + 7) // 8
        self._headers[slot][self._rank][_TEXT_BYTES : _TEXT_BYTES + size] = flags.to_bytes(size, "little")

    def publish(self) -> int:
        """Hand the slot over; the number of this tick."""
        self.tick += 1
        self._mine[self._at] = self.tick
        return self.tick

    def wait(self) -> None:
        """Return when the slots of all ranks are there.

        Raises:
            TrainingError: with MISMATCH, on every rank, if ranks have announced different things.
            RuntimeError: a rank will not come; see `SharedMemory`.
        """
        wait_for(self._others, self._at, self.tick, self._look, spins=self.spins)
        if self._announced:
            mine, self._announced = self._announced, b""
            texts = [bytes(header[:_TEXT_BYTES]) for header in self._headers[self.tick & 1]]
            if any(text != mine for text in texts):
                raise _mismatch(self._names, texts)

    def flags(self, count: int) -> list[int]:
        """The `count` bits that each rank has written in this tick."""
        size = (count + 7) // 8
        slots = self._headers[self.tick & 1]
        return [int.from_bytes(slot[_TEXT_BYTES : _TEXT_BYTES + size], "little") for slot in slots]

    def arrived(self, tick: int) -> bool:
        """Whether all ranks have published this tick."""
        return all(counter[self._at] >= tick for counter in self._others)


def _mismatch(names: Sequence[int], texts: Sequence[bytes]) -> TrainingError:
    words = "; ".join(
        f"rank {name} called {text.rstrip(bytes(1)).decode(errors='replace')}"
        for name, text in zip(names, texts, strict=True)
    )
    return TrainingError(
        f"Detected mismatch between collectives in shared memory: {words}. All ranks must call the same ones in the "
        "same order.",
        ExitCode.MISMATCH,
    )


def wait_for(lines: Sequence[memoryview], at: int, value: int, look: Look, *, spins: int = SPINS) -> None:
    """Return when word `at` of each of `lines` is `value` or more.

    Args:
        lines: of unsigned 64-bit words; one for each other process, who alone writes it, and never a smaller number.
        at: which word.
        value: to be reached.
        look: called between two sleeps.
        spins: looks without a pause; 0 where ranks share cores.
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


GROUP = SHARED_GROUP  # `hosts` has other names for several hosts
PAGE, LINE = 4096, 64
TOKEN_BYTES = 16
_SMALL_BYTES = 64 << 10
BULK_BYTES = 2 << 20  # of 1, 2, 4 and 8 MiB the fastest here: two slots of two ranks stay in a core's cache
LIFE_SECONDS = 0.1  # between two looks whether a process that is waited for is still there


@dataclass(frozen=True)
class MemoryLayout:
    """Where everything lies in the memory of each of `ranks` ranks, in bytes."""

    ranks: int
    bulk_bytes: int = BULK_BYTES

    @property
    def channels(self) -> tuple[int, ...]:
        """The data bytes of each channel's slot: totals, bulk."""
        return _SMALL_BYTES, self.bulk_bytes

    @property
    def counters_at(self) -> int:
        """Behind the tokens, at the next page."""
        return -(-(TOKEN_BYTES * (1 + self.ranks)) // PAGE) * PAGE

    def slot(self, channel: int, number: int) -> tuple[int, int]:
        """Where slot 0 or 1 of a channel begins and ends."""
        before = sum(2 * (HEADER_BYTES + size) for size in self.channels[:channel])
        size = HEADER_BYTES + self.channels[channel]
        start = self.counters_at + PAGE + before + number * size
        return start, start + size

    @property
    def total_bytes(self) -> int:
        """Of one rank's memory."""
        return self.slot(len(self.channels) - 1, 1)[1]


@dataclass(frozen=True)
class MemoryPeer:
    """A rank that shares memory: its process, by number and start, and the memory that it has made."""

    rank: int  # of the world
    pid: int
    start: int  # see `procfs.Process`
    memory: memoryview


@dataclass(frozen=True)
class MemoryCall:
    """One collective, as the hang guard and the other ranks shall know it."""

    op: Op
    text: bytes


class SharedMemory:
    """The memories of all ranks of a group on one host, mapped into this process. `rank` and `size` are the group's.

    A rank waits for others no longer than `timeout_seconds`, and no longer than they can come: it raises at once when
    the hang guard frees it, and within a fraction of a second when a rank that it waits for has ended, or has raised
    out of such a wait itself. After that nothing can be sent any more.
    """

    def __init__(
        self,
        peers: Sequence[MemoryPeer],
        rank: int,
        layout: MemoryLayout,
        timeout_seconds: float,
        *,
        group: str = GROUP,
        of_all: bool = True,
    ) -> None:
        """`rank` is our place among `peers`; `of_all` tells whether these are all ranks of the world."""
        self.rank, self.size, self.timeout_seconds = rank, len(peers), timeout_seconds
        self.running: Any = None  # a sum that was started, and not yet asked for: see `StartedSum`
        self._group, self._of_all, self._pid = group, of_all, os.getpid()
        self._others = [(index, peer) for index, peer in enumerate(peers) if index != rank]
        at = layout.counters_at
        counters = [peer.memory[at : at + PAGE].cast("Q") for peer in peers]
        self._left = [counter[len(layout.channels) * LINE // 8 :] for counter in counters]
        self._looked_seconds = 0.0
        self._ranks = tuple(peer.rank for peer in peers)
        self._call = self.called("", "")
        crowded = self.size > usable_cores()
        made: list[Channel] = []
        for number in range(len(layout.channels)):
            slots = [[peer.memory[slice(*layout.slot(number, slot))] for peer in peers] for slot in (0, 1)]
            channel = Channel(number * LINE // 8, rank, counters, slots, self._look, self._ranks)
            channel.spins = 0 if crowded else SPINS
            made.append(channel)
        self.totals, self.bulk = made

    def called(self, kind: str, name: str, shape: str = "", dtype: torch.dtype | str = "") -> MemoryCall:
        """A collective in words; made once for what is called again and again."""
        op = Op(self._group, 0, kind, name, shape, str(dtype).removeprefix("torch."))
        return MemoryCall(op, f"{kind} '{name}' {shape} {op.dtype}".rstrip().encode())

    @contextmanager
    def operation(self, channel: Channel, call: MemoryCall, work: object = None) -> Generator[None]:
        """Around the ticks of one collective: the hang guard sees it, and all ranks must have begun the same one.

        Where it ends elsewhere, around those that begin it; `work` is then what knows whether it is over.
        """
        if self._left[self.rank][0]:
            raise RuntimeError(
                f"{call.text.decode()}: this rank has left the shared memory, after an error or at the end"
            )
        self._call = call
        channel.announce(call.text)
        begun = Guard.of_process().ledger.begin_own(self, self._ranks, call.op, of_all=self._of_all)
        try:
            yield
        except BaseException:
            self.leave()  # the others would wait for the rest of it
            Guard.of_process().ledger.end_own(begun, failed=True)
            raise
        Guard.of_process().ledger.end_own(begun, work)

    def leave(self) -> None:
        """Tell all ranks that this one will not come any more; may be called twice."""
        if os.getpid() == self._pid:  # not in a process that this one has forked
            self._left[self.rank][0] = 1

    def _look(self, missing: Callable[[], list[int]], waited_seconds: float) -> None:
        """While it waits: raise if there is no point in it."""
        if Guard.of_process().released():
            names = self._names(missing())
            raise RuntimeError(
                f"{self._call.text.decode()}: connection closed by peer: freed from the wait for {names}"
            )
        gone = [index for index in missing() if self._left[self._others[index][0]][0]]
        words = "has left"
        if not gone and time.monotonic() - self._looked_seconds > LIFE_SECONDS:
            gone = [index for index in missing() if not _lives(self._others[index][1])]
            words, self._looked_seconds = "has ended", time.monotonic()
        # who came just before it went has come: what it stored before is seen before
        if gone and (gone := [index for index in missing() if index in gone]):
            raise RuntimeError(f"{self._call.text.decode()}: connection closed by peer: {self._names(gone)} {words}")
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
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


MACHINES = ("x86_64", "AMD64", "i686")  # whose memory order makes it right: see `Channel`
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


def runs_of_hosts(keys: Sequence[str]) -> list[range]:
    """The ranks of each host, by each rank's key of its host; empty where ranks of one key are not all neighbours.

    runs_of_hosts(["a", "a", "b"]) == [range(0, 2), range(2, 3)]; of ["a", "b", "a"] there are none
    """
    runs: list[range] = []
    for rank, key in enumerate(keys):
        if rank > 0 and key == keys[rank - 1]:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return runs if len(runs) == len(set(keys)) else []
