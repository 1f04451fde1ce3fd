"""Snapshots: the newest state in memory that outlives its process, for a restarted worker to go on from.

The agent has made two memory files for each rank of its node, and keeps them over restarts. A rank writes into them in
turn, so one whole state is always there. Ranks write at the same steps, and no rank begins the next snapshot before
all have taken a step since the last one; so the parts of the same step make up a whole state.

Each host keeps a whole state: its ranks share it out among themselves. So any one host is enough to go on, and those
that come new, or have an older one, are sent it.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.checkpoint.format import Piece
from paceline.checkpoint.shards import LENGTH_BYTES, ShardFiles, fill, layout, rank_part, read_meta
from paceline.checkpoint.state import Held
from paceline.collectives.control import costs, gather_words
from paceline.collectives.replicate import broadcast
from paceline.contract.birth import WorkerBirth
from paceline.worker.world import World

Pair = tuple[int, int]
SENT_BYTES = 1 << 26  # at once, between hosts


class _Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which state a file holds a part of: the `part`-th of `parts`."""

    generation: int
    step: int
    part: int
    parts: int
    content: dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """A whole state in memory."""

    generation: int
    step: int
    content: dict[str, Any]
    source: ShardFiles
    files: tuple[int, ...]
    """the memory files that it lies in"""

    @property
    def age(self) -> tuple[int, int]:
        """The larger, the newer."""
        return self.generation, self.step


def inherited() -> list[Pair]:
    """The memory files of this node's ranks, by local rank; none without an agent that restarts."""
    birth = WorkerBirth.here()
    return [] if birth is None else [*birth.snapshots]


class SnapshotWriter:
    """Writes this rank's snapshots: the `part`-th of `parts` that its host's ranks write."""

    def __init__(self, files: Pair, part: int, parts: int, generation: int, *, spared: int | None) -> None:
        """`spared` is the file not to be written first: the state that training goes on from may be in it."""
        self._files, self._part, self._parts, self._generation = files, part, parts, generation
        self._next = files[1] if spared == files[0] else files[0]
        self._buffers: dict[int, Tensor] = {}
        self._locked: set[int] = set()
        """the addresses of those into which a GPU copies by itself"""

    def write(self, held: Sequence[Held], step: int, content: dict[str, Any]) -> int:
        """Copy this rank's part of the state; return its bytes.

        Raises:
            OSError: if there is no memory for it; the snapshot before this one is still there.
        """
        descriptor = self._next
        part, places = layout(rank_part(held, self._part, self._parts), room_bytes=65536)
        buffer = self._buffer(descriptor, places.total_bytes, any(costs(held.tensor.device) for held in part))
        mark = _Mark(self._generation, step, self._part, self._parts, content)
        fill(buffer, part, places, msgspec.to_builtins(mark))
        self._next = self._files[0] if descriptor == self._files[1] else self._files[1]
        return places.total_bytes

    def _buffer(self, descriptor: int, size_bytes: int, far: bool) -> Tensor:
        buffer = self._buffers.get(descriptor)
        if buffer is None or len(buffer) != size_bytes:
            if (old := self._buffers.pop(descriptor, None)) is not None and old.data_ptr() in self._locked:
                _cudart().cudaHostUnregister(old.data_ptr())  # before its memory goes
                self._locked.remove(old.data_ptr())
            del buffer, old
            os.ftruncate(descriptor, 0)  # what is in it is no longer a state
            os.posix_fallocate(descriptor, 0, size_bytes)  # fails now; a write without room would kill the process
            buffer = torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)
            self._buffers[descriptor] = buffer
            if far and _is_page_locked(buffer):
                self._locked.add(buffer.data_ptr())
        return buffer


def _is_page_locked(buffer: Tensor) -> bool:
    """Ask CUDA for it; without, or if it refuses, the host waits for each copy."""
    if not torch.cuda.is_available():
        return False
    refused = int(_cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if refused:
        with suppress(RuntimeError):  # else the next kernel would report this as an error of its own
            torch.zeros(1, device="cuda")
    return not refused


def _cudart() -> Any:
    return torch.cuda.cudart()


def newest(pairs: Sequence[Pair]) -> Snapshot | None:
    """The newest state of which every part is there."""
    return newest_in([descriptor for pair in pairs for descriptor in pair])


def newest_in(descriptors: Sequence[int]) -> Snapshot | None:
    """The newest state of which every part is in one of these memory files."""
    found: dict[tuple[int, int, int], dict[int, tuple[int, _Mark, tuple[Piece, ...]]]] = {}
    for descriptor in descriptors:
        if os.fstat(descriptor).st_size <= LENGTH_BYTES or not any(os.pread(descriptor, LENGTH_BYTES, 0)):
            continue
        read = read_meta(_path(descriptor))
        if read is None:
            continue
        with suppress(msgspec.ValidationError):  # not ours
            mark = msgspec.convert(read[0], _Mark)
            parts = found.setdefault((mark.generation, mark.step, mark.parts), {})
            parts[mark.part] = (descriptor, mark, read[1])
    whole = [key for key, parts in found.items() if len(parts) == key[2]]
    if not whole:
        return None
    parts = found[max(whole, key=lambda key: (key[0], key[1]))]
    mark = parts[0][1]
    source = ShardFiles([(_path(descriptor), pieces) for descriptor, _, pieces in parts.values()])
    files = tuple(descriptor for descriptor, _, _ in parts.values())
    return Snapshot(mark.generation, mark.step, mark.content, source, files)


def snapshot_of(giver: int, mine: Snapshot | None, world: World) -> Snapshot:
    """Rank `giver`'s snapshot (a collective): `mine`, or where that is None a copy in memory of this process."""
    sizes = None if mine is None else [os.fstat(file).st_size for file in mine.files]
    files: list[int] = []
    for number, size_bytes in enumerate(gather_words(sizes, world)[giver]):
        if mine is None:
            files.append(os.memfd_create("paceline-sent"))
        for at in range(0, size_bytes, SENT_BYTES):
            room = bytearray(min(SENT_BYTES, size_bytes - at))
            if mine is not None and world.rank == giver:
                os.preadv(mine.files[number], [room], at)
            piece = torch.frombuffer(room, dtype=torch.uint8).to(world.device)
            broadcast([piece], giver, "a snapshot", world.group)
            if mine is None:
                os.pwrite(files[-1], piece.cpu().numpy().tobytes(), at)
    if mine is not None:
        return mine
    found = newest_in(files)
    assert found is not None
    weakref.finalize(found.source, _close, files)
    return found


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def _path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"
