"""Snapshots: the newest state in memory that survives a crash of its process. A restarted worker resumes from it.

The agent creates two memory files for each rank of its node, and keeps them over restarts. A rank writes into them
alternately: one complete state always exists. All ranks write at the same steps, and no rank begins the next snapshot
before all have taken a step since the last one. The parts of the same step therefore form a complete state.

Each host keeps a complete state, split over its ranks. A single host is therefore enough to resume. New hosts, and
hosts with an older state, receive it. With most strategies, every rank has the full state, and snapshots need no
communication. If ranks have shards (zero, fsdp, a mesh), or each host has a separate state (the residual of a
compression), the ranks with the same number on their hosts exchange their parts:

    before     rank 0 has a, rank 1 has b        rank 2 has c, rank 3 has d
    after      rank 0 has a c, rank 1 has b d    rank 2 has a c, rank 3 has b d
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

from paceline.checkpoint.shards import (
    DTYPES_BY_NAME,
    ShardFileSource,
    make_shard_layout,
    read_shard_file_metadata,
    select_shards_to_save,
    serialize_shard_file,
)
from paceline.checkpoint.state import TensorShard
from paceline.collectives.control import all_gather_object, is_async_device
from paceline.collectives.replicate import broadcast
from paceline.collectives.sum_tree import round_up
from paceline.collectives.torch_collectives import all_gather_json, start_all_gather
from paceline.host.cgroup import free_memory
from paceline.protocol.control import WorkerSpec
from paceline.rank.world import World
from paceline.runs.checkpoint_format import Piece

ROOM_BYTES = 1 << 16  # the header grows by this size, for the values of the state other than tensors
DescriptorPair = tuple[int, int]
MAX_MESSAGE_BYTES = 1 << 26  # in one message between hosts
MAX_TIME_FRACTION = 0.05  # of training time: on a slow network some snapshots are skipped
STATE_COPIES_IN_MEMORY = 2.5  # of the full state: two snapshots, and one in transfer


class SnapshotMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes the content of a memory file: part number `part` of `parts` of a state."""

    generation: int
    step: int
    part: int
    parts: int
    content: dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    meta: SnapshotMeta  # of one of its parts
    source: ShardFileSource
    memory_file_descriptors: tuple[int, ...]  # the descriptors of its memory files


def inherited_memory_files() -> list[DescriptorPair]:
    """The memory files of this node's ranks, by local rank. Empty without an agent that restarts workers."""
    spec = WorkerSpec.from_environment()
    return [] if spec is None else [*spec.snapshots]


# ---- write


class SnapshotWriter:
    """Writes this rank's snapshots: part number `part` of the `parts` of its host."""

    def __init__(self, files: DescriptorPair, part: int, parts: int, generation: int, *, spared: int | None) -> None:
        """`spared`: the file to overwrite last, because it may hold the state that training resumes from."""
        self._part, self._parts, self._generation = part, parts, generation
        self._files = files[::-1] if spared == files[0] else files  # the next one first
        self._buffers: dict[int, Tensor] = {}
        self._locked: set[int] = set()  # the addresses of page-locked buffers. A GPU copies into them without the host

    def write(self, shards: Sequence[TensorShard], step: int, content: dict[str, Any]) -> int:
        """Copy this rank's part of the state, and return its number of bytes.

        Raises:
            OSError: if there is not enough memory. The previous snapshot is still available.
        """
        descriptor, other = self._files
        meta = SnapshotMeta(self._generation, step, self._part, self._parts, content)
        # a multiple, so that the size stays equal; three times, because quotes and characters are escaped
        room_bytes = round_up(3 * len(msgspec.json.encode(meta)) + ROOM_BYTES // 2, ROOM_BYTES)
        shard = make_shard_layout(select_shards_to_save(shards, self._part, self._parts), room_bytes=room_bytes)
        on_gpu = any(is_async_device(entry.tensor.device) for entry in shard.shards)
        buffer = self._buffer(descriptor, shard.total_bytes, on_gpu)
        serialize_shard_file(buffer, shard, msgspec.to_builtins(meta))
        self._files = other, descriptor
        return shard.total_bytes

    def _buffer(self, descriptor: int, size_bytes: int, page_locked: bool) -> Tensor:
        buffer = self._buffers.get(descriptor)
        if buffer is None or len(buffer) != size_bytes:
            if (old := self._buffers.pop(descriptor, None)) is not None and old.data_ptr() in self._locked:
                cudart: Any = torch.cuda.cudart()
                cudart.cudaHostUnregister(old.data_ptr())  # before its memory is freed
                self._locked.remove(old.data_ptr())
            del buffer, old
            os.ftruncate(descriptor, 0)  # its content is no longer a state
            os.posix_fallocate(descriptor, 0, size_bytes)  # raises an error; a later write would kill the process
            buffer = torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)
            self._buffers[descriptor] = buffer
            if page_locked and _lock_pages(buffer):
                self._locked.add(buffer.data_ptr())
        return buffer


def _lock_pages(buffer: Tensor) -> bool:
    """Page-lock the memory of `buffer`. If this fails, the host waits for each copy."""
    if not torch.cuda.is_available():
        return False
    cudart: Any = torch.cuda.cudart()
    error_code = int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if error_code:
        with suppress(RuntimeError):  # clears the error, which the next kernel would report
            torch.zeros(1, device="cuda")
    return not error_code


class InterNodeExchange:
    """Exchanges parts of the state with the ranks of the same number on the other hosts."""

    def __init__(self, held: Sequence[TensorShard], world: World) -> None:
        """A collective. `held`: the state on this rank."""
        self._world = world
        self._group: dist.ProcessGroup | None = None
        self._tries, self._pause, self._since = 0, 0, -math.inf  # no pause before the first exchange is timed
        unique_bytes, local = sum(shard.tensor.nbytes for shard in held if shard.is_unique), world.local_size
        replicated = sum(shard.tensor.nbytes for shard in held if shard.replicated)
        by_rank = all_gather_object([[world.local_rank, local], unique_bytes, free_memory(), replicated], world)
        total = sum(unique_bytes for _, unique_bytes, _, _ in by_rank) + by_rank[0][3]
        self.why_not = ""  # the reason why snapshots are impossible, the same on all ranks; empty if they are possible
        if any(unique_bytes for _, unique_bytes, _, _ in by_rank):
            if any(at != [rank % local, local] for rank, (at, *_) in enumerate(by_rank)) or world.group is not None:
                self.why_not = "nodes have parts of the state, and different numbers of ranks"
            elif any(free is not None and free < STATE_COPIES_IN_MEMORY * total for _, _, free, _ in by_rank):
                self.why_not = f"every node would need {STATE_COPIES_IN_MEMORY * total / 1e9:.1f} GB, "
                self.why_not += f"{STATE_COPIES_IN_MEMORY:g} times the full state"
            else:
                groups = [dist.new_group([*range(n, world.size, local)], group_desc="snapshots") for n in range(local)]
                group = groups[world.local_rank]
                assert isinstance(group, dist.ProcessGroup)  # this rank is a member
                self._group = group
                # connects now, not in a timed exchange
                all_gather_json(None, len(by_rank) // local, world.device, group)

    def exchange_missing_shards(self, shards: Sequence[TensorShard]) -> list[TensorShard] | None:
        """The parts that this host does not have (a collective). None: skip this snapshot, it takes too long."""
        if self._group is None:
            return []
        self._tries += 1
        if self._tries <= self._pause:
            return None
        began = time.perf_counter()
        others = self._exchange(shards, self._group)
        ended = time.perf_counter()
        times = all_gather_object([ended - began, (began - self._since) / self._tries], self._world)
        duration, interval = max(times)[0], times[0][1]  # the interval of one rank: all ranks must pause equally
        pause = math.ceil(duration / (MAX_TIME_FRACTION * interval)) - 1
        self._tries, self._pause, self._since = 0, max(0, pause), ended
        return others

    def _exchange(self, shards: Sequence[TensorShard], group: dist.ProcessGroup) -> list[TensorShard]:
        world = self._world
        shard = make_shard_layout(shard for shard in shards if shard.is_unique)
        own_buffer = torch.empty(shard.total_bytes, dtype=torch.uint8)
        serialize_shard_file(own_buffer, shard, {})
        offsets = [shard.header_bytes + offset for offset in shard.offsets]
        hosts, number = world.size // world.local_size, world.rank // world.local_size
        description = [msgspec.to_builtins(shard.pieces), offsets, len(own_buffer)]
        descriptions = all_gather_json(description, hosts, world.device, group)
        host_buffers = [torch.empty(size, dtype=torch.uint8) for *_, size in descriptions]
        largest = max(map(len, host_buffers))
        for at in range(0, largest, MAX_MESSAGE_BYTES):
            size = min(MAX_MESSAGE_BYTES, largest - at)
            sent = torch.zeros(size, dtype=torch.uint8, device=world.device)
            sent[: max(0, len(own_buffer) - at)] = own_buffer[at : at + size].to(world.device)
            for buffer, received in zip(host_buffers, start_all_gather(sent, "a snapshot", group)(), strict=True):
                target = buffer[at : at + size]
                target.copy_(received[: len(target)])
        return [
            _received(msgspec.convert(piece, Piece), host_buffers[host], offset)
            for host, (pieces, starts, _) in enumerate(descriptions)
            for piece, offset in zip(pieces, starts, strict=True)
            if host != number
        ]


def _received(piece: Piece, data: Tensor, at: int) -> TensorShard:
    dtype, shape = DTYPES_BY_NAME[piece.dtype], torch.Size(piece.shape)
    values = data[at : at + piece.elements * dtype.itemsize].view(dtype)
    if piece.key == piece.name:
        return TensorShard(piece.name, values.view(shape), replicated=False)
    return TensorShard(
        piece.name, values, shape, piece.start, replicated=False, count=piece.count, range_stride=piece.apart
    )


# ---- read


def newest_snapshot(files: Iterable[Sequence[int]]) -> Snapshot | None:
    """The newest state with all its parts in these memory files, by rank."""
    states: dict[tuple[int, int, int], dict[int, tuple[int, SnapshotMeta, tuple[Piece, ...]]]] = {}
    for descriptor in itertools.chain.from_iterable(files):
        metadata = read_shard_file_metadata(_path(descriptor))
        if metadata is None:
            continue
        with suppress(msgspec.ValidationError):  # not written by paceline
            meta = msgspec.convert(metadata[0], SnapshotMeta)
            states.setdefault((meta.generation, meta.step, meta.parts), {})[meta.part] = descriptor, meta, metadata[1]
    complete = [key for key, parts in states.items() if len(parts) == key[2]]
    if not complete:
        return None
    parts = states[max(complete, key=lambda key: (key[0], key[1]))]
    source = ShardFileSource([(_path(descriptor), pieces) for descriptor, _, pieces in parts.values()])
    return Snapshot(parts[0][1], source, tuple(file for file, *_ in parts.values()))


def broadcast_snapshot(source: int, mine: Snapshot | None, world: World) -> Snapshot:
    """Copy the snapshot of rank `source` to all ranks whose snapshot, `mine`, is None (a collective)."""
    sizes = None if mine is None else [os.fstat(file).st_size for file in mine.memory_file_descriptors]
    files: list[int] = []
    for number, size_bytes in enumerate(all_gather_object(sizes, world)[source]):
        if mine is None:
            files.append(os.memfd_create("paceline-sent"))
        for at in range(0, size_bytes, MAX_MESSAGE_BYTES):
            buffer = bytearray(min(MAX_MESSAGE_BYTES, size_bytes - at))
            if mine is not None and world.rank == source:
                os.preadv(mine.memory_file_descriptors[number], [buffer], at)
            block = torch.frombuffer(buffer, dtype=torch.uint8).to(world.device)
            broadcast([block], source, "a snapshot", world.group)
            if mine is None:
                os.pwrite(files[-1], block.cpu().numpy().tobytes(), at)
    if mine is not None:
        return mine
    received = newest_snapshot([files])
    assert received is not None
    for file in files:
        weakref.finalize(received.source, os.close, file)
    return received


def _path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"
