"""Snapshots: the newest state in memory that outlives its process, for a restarted worker to resume from.

The agent has made two memory files for each rank of its node, and keeps them over restarts. A rank writes into them in
turn, so one complete state is always there. Ranks write at the same steps, and no rank begins the next snapshot before
all have taken a step since the last one. The parts of the same step therefore make up a complete state.

Each host keeps a complete state, split over its ranks. One host is therefore enough to resume, and new hosts, or hosts
with an older state, receive it. With most strategies every rank holds the whole state, and snapshots need no
communication. If ranks hold shards (zero, fsdp, a mesh), or each host has a state of its own (the remainder of a
compression), the ranks with the same number on their hosts exchange their parts:

    hosts      rank 0 holds a, rank 1 b      rank 2 holds c, rank 3 d
    after      rank 0 holds a c, rank 1 b d  rank 2 holds a c, rank 3 b d
"""

import itertools
import math
import mmap
import os
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.format import LENGTH_BYTES, Piece
from paceline.checkpoint.shards import TYPES, ShardFiles, fill, layout, rank_part, read_meta
from paceline.checkpoint.state import TensorShard
from paceline.collectives.control import costs, gather_words
from paceline.collectives.replicate import broadcast
from paceline.collectives.torch_collectives import gather_over_torch, start_gather
from paceline.host.cgroup import free_memory
from paceline.protocol.control import WorkerSpec
from paceline.rank.world import World

Pair = tuple[int, int]
SENT_BYTES = 1 << 26  # in one message between hosts
MOST_SHARE = 0.05  # of the time of training: on a slow network not every snapshot is taken
COPIES = 2.5  # of the whole state: two snapshots, and one in transfer


class SnapshotMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of which a memory file holds a part: the `part`-th of `parts`."""

    generation: int
    step: int
    part: int
    parts: int
    content: dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """A complete state in memory."""

    meta: SnapshotMeta
    """that of one of its parts"""
    source: ShardFiles
    files: tuple[int, ...]
    """the memory files that hold it"""


def inherited() -> list[Pair]:
    """The memory files of this node's ranks, by local rank; none without an agent that restarts."""
    spec = WorkerSpec.here()
    return [] if spec is None else [*spec.snapshots]


# ---- write


class SnapshotWriter:
    """Writes this rank's snapshots: the `part`-th of `parts` that its host's ranks write."""

    def __init__(self, files: Pair, part: int, parts: int, generation: int, *, spared: int | None) -> None:
        """`spared` is the file not to be written first: it may hold the state that training resumes from."""
        self._part, self._parts, self._generation = part, parts, generation
        self._files = files[::-1] if spared == files[0] else files
        """the next one first"""
        self._buffers: dict[int, Tensor] = {}
        self._locked: set[int] = set()
        """the addresses of page-locked buffers, into which a GPU copies without the host"""

    def write(self, held: Sequence[TensorShard], step: int, content: dict[str, Any]) -> int:
        """Copy this rank's part of the state; return its bytes.

        Raises:
            OSError: if there is no memory for it; the snapshot before this one is still there.
        """
        descriptor, other = self._files
        shard = layout(rank_part(held, self._part, self._parts), room_bytes=65536)
        buffer = self._buffer(descriptor, shard.total_bytes, any(costs(held.tensor.device) for held in shard.part))
        meta = SnapshotMeta(self._generation, step, self._part, self._parts, content)
        fill(buffer, shard, msgspec.to_builtins(meta))
        self._files = other, descriptor
        return shard.total_bytes

    def _buffer(self, descriptor: int, size_bytes: int, far: bool) -> Tensor:
        buffer = self._buffers.get(descriptor)
        if buffer is None or len(buffer) != size_bytes:
            if (old := self._buffers.pop(descriptor, None)) is not None and old.data_ptr() in self._locked:
                _cudart().cudaHostUnregister(old.data_ptr())  # before its memory is freed
                self._locked.remove(old.data_ptr())
            del buffer, old
            os.ftruncate(descriptor, 0)  # its content is no longer a state
            os.posix_fallocate(descriptor, 0, size_bytes)  # fails now; a write without memory would kill the process
            buffer = torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)
            self._buffers[descriptor] = buffer
            if far and _is_page_locked(buffer):
                self._locked.add(buffer.data_ptr())
        return buffer


def _is_page_locked(buffer: Tensor) -> bool:
    """Ask CUDA to lock its pages. Without CUDA, or if it refuses, the host waits for each copy."""
    if not torch.cuda.is_available():
        return False
    refused = int(_cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if refused:
        with suppress(RuntimeError):  # else the next kernel would report this as an error of its own
            torch.zeros(1, device="cuda")
    return not refused


def _cudart() -> Any:
    return torch.cuda.cudart()


class OtherHosts:
    """The ranks that have this rank's number on other hosts; brings the parts that only they hold to this rank."""

    def __init__(self, held: Sequence[TensorShard], world: World) -> None:
        """A collective; `held` is this rank's state."""
        self._world = world
        self._group: dist.ProcessGroup | None = None
        self._tries, self._pause, self._since = 0, 0, -math.inf  # the duration is not known before the first time
        own, local = sum(shard.tensor.nbytes for shard in _own(held)), world.local_size
        replicated = sum(shard.tensor.nbytes for shard in held if shard.replicated)
        ranks = gather_words([[world.local_rank, local], own, free_memory(), replicated], world)
        total = sum(own for _, own, _, _ in ranks) + ranks[0][3]
        self.why_not = ""
        """why snapshots are impossible; the same on all ranks"""
        if any(own for _, own, _, _ in ranks):
            if any(at != [rank % local, local] for rank, (at, *_) in enumerate(ranks)) or world.group is not None:
                self.why_not = "hosts with unequal numbers of ranks hold parts of the state"
            elif any(free is not None and free < COPIES * total for _, _, free, _ in ranks):
                self.why_not = f"every host would need {COPIES * total / 1e9:.1f} GB, {COPIES:g} times the whole state"
            else:
                groups = [dist.new_group([*range(n, world.size, local)], group_desc="snapshots") for n in range(local)]
                own_group = groups[world.local_rank]
                assert isinstance(own_group, dist.ProcessGroup)  # this rank is a member
                self._group = own_group
                gather_over_torch(None, len(ranks) // local, world.device, own_group)  # connects: this is not timed

    def bring(self, held: Sequence[TensorShard]) -> list[TensorShard] | None:
        """The parts that only they hold; None: not this time, it would take too long (a collective)."""
        if self._group is None:
            return []
        self._tries += 1
        if self._tries <= self._pause:
            return None
        began = time.perf_counter()
        others = self._exchanged(held, self._group)
        ended = time.perf_counter()
        times = gather_words([ended - began, (began - self._since) / self._tries], self._world)
        took, every = max(times)[0], times[0][1]  # the intervals of one rank, or ranks would pause differently
        self._tries, self._pause, self._since = 0, max(0, math.ceil(took / (MOST_SHARE * every)) - 1), ended
        return others

    def _exchanged(self, held: Sequence[TensorShard], group: dist.ProcessGroup) -> list[TensorShard]:
        world = self._world
        shard = layout(_own(held))
        mine = torch.empty(shard.total_bytes, dtype=torch.uint8)
        fill(mine, shard, {})
        offsets = [shard.header_bytes + offset for offset in shard.offsets]
        hosts, number = world.size // world.local_size, world.rank // world.local_size
        described = [msgspec.to_builtins(shard.pieces), offsets, len(mine)]
        descriptions = gather_over_torch(described, hosts, world.device, group)
        every = [torch.empty(size, dtype=torch.uint8) for *_, size in descriptions]
        largest = max(map(len, every))
        for at in range(0, largest, SENT_BYTES):
            size = min(SENT_BYTES, largest - at)
            sent = torch.zeros(size, dtype=torch.uint8, device=world.device)
            sent[: max(0, len(mine) - at)] = mine[at : at + size].to(world.device)
            for whole, received in zip(every, start_gather(sent, "a snapshot", group)(), strict=True):
                rest = whole[at : at + size]
                rest.copy_(received[: len(rest)])
        return [
            _received(msgspec.convert(piece, Piece), every[host], offset)
            for host, (pieces, starts, _) in enumerate(descriptions)
            for piece, offset in zip(pieces, starts, strict=True)
            if host != number
        ]


def _own(held: Sequence[TensorShard]) -> list[TensorShard]:
    """The tensors that only this rank can save."""
    return [one for one in held if not (one.replicated or one.spare)]


def _received(piece: Piece, data: Tensor, at: int) -> TensorShard:
    """The tensor at byte `at`, as the rank that has sent it holds it."""
    dtype, shape = TYPES[piece.dtype], torch.Size(piece.shape)
    values = data[at : at + piece.elements * dtype.itemsize].view(dtype)
    if piece.key == piece.name:
        return TensorShard(piece.name, values.view(shape), replicated=False)
    return TensorShard(piece.name, values, shape, piece.start, replicated=False, count=piece.count, apart=piece.apart)


# ---- read


def newest(files: Iterable[Sequence[int]]) -> Snapshot | None:
    """The newest state of which every part is in one of these memory files, given by rank."""
    found: dict[tuple[int, int, int], dict[int, tuple[int, SnapshotMeta, tuple[Piece, ...]]]] = {}
    for descriptor in itertools.chain.from_iterable(files):
        if os.fstat(descriptor).st_size <= LENGTH_BYTES or not any(os.pread(descriptor, LENGTH_BYTES, 0)):
            continue
        read = read_meta(_path(descriptor))
        if read is None:
            continue
        with suppress(msgspec.ValidationError):  # not written by paceline
            meta = msgspec.convert(read[0], SnapshotMeta)
            found.setdefault((meta.generation, meta.step, meta.parts), {})[meta.part] = descriptor, meta, read[1]
    complete = [key for key, parts in found.items() if len(parts) == key[2]]
    if not complete:
        return None
    parts = found[max(complete, key=lambda key: (key[0], key[1]))]
    source = ShardFiles([(_path(descriptor), pieces) for descriptor, _, pieces in parts.values()])
    return Snapshot(parts[0][1], source, tuple(file for file, *_ in parts.values()))


def snapshot_of(giver: int, mine: Snapshot | None, world: World) -> Snapshot:
    """Rank `giver`'s snapshot (a collective): `mine`, or if that is None a copy in memory of this process."""
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
    found = newest([files])
    assert found is not None
    for file in files:
        weakref.finalize(found.source, os.close, file)
    return found


def _path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"
