"""What the ranks of one host share: memory that each of them has made, and all of them have mapped.

A rank's memory is a file without a name: it needs no /dev/shm (64 MB in many containers), and is gone with the last
process that maps it. Its size is fixed; whatever is sent passes through it in pieces (see `channel`).

    offset       what
         0       this rank's token, then one place for the token of each other rank (see `handshake`)
    page-wise    counters, one cache line for each channel and one for `left`; written by this rank alone
    then         for each channel two slots: header (what it is, absent gradients) and data

For other parts (all ranks that share it call the same ones in the same order; tensors are on the CPU):

    memory = choose().memory                          # None: not all ranks are on one host; then use torch.distributed
    reduce_scatter(memory, own, forest, out, divisor) # own: (n,) for each of my subtrees, or None; out: (n / W,), mine
    all_gather(memory, mine, out)                     # mine: (n / W,), out: (n,)
    broadcast_in_memory(memory, tensors, src=0); barrier(memory)
    TreeSum(memory, sizes, dtypes, forest).run(nodes, divisor)   # the sum of lists of tensors, in place
"""

import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.contract.evidence import SHARED_GROUP, Op
from paceline.host.cgroup import usable_cores
from paceline.host.procfs import read_process
from paceline.sums.channel import HEADER_BYTES, SPINS, Channel
from paceline.worker.guard import Guard

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
        self.running: Any = None  # a sum that was started, and not yet asked for: see `totals`
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
        begun = Guard.of_process().begin_own(self, self._ranks, call.op, of_all=self._of_all)
        try:
            yield
        except BaseException:
            self.leave()  # the others would wait for the rest of it
            Guard.of_process().end_own(begun, failed=True)
            raise
        Guard.of_process().end_own(begun, work)

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
