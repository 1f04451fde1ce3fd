"""Processes hand memory to each other, over and over, without any lock.

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
lock's own would do by accident of its implementation. So there is no shared memory on them: see `handshake.MACHINES`.
"""

import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.errors import ExitCode, TrainingError

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
