"""Collectives of ranks that share memory: sums of lists of tensors in the order of `tree`, and all others.

Each collective consists of ticks (see `memory`). All ranks call the same collectives in the same order.

The shared memory has a fixed size, and a list of tensors is sent in chunks. A large tensor is split into segments of
equal size, each a separate chunk. Small tensors share a chunk. Each rank has a list for each subtree that it owns. In
the slot of a rank, each list has a lane:

    slot of rank 1     | lane 0: segment of its first subtree | lane 1: segment of its second subtree | ...

For each chunk, each rank copies the data for the other ranks into its memory. If there is little data, each rank then
adds up all of it. Otherwise each rank adds up its shard of the chunk, and sends it in the tick of the next chunk.
Gradients are read and written in place, in autograd's memory, without a flat copy.
"""

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from operator import add, itemgetter
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.buckets import Layout, divide, is_present
from paceline.collectives.shared_memory import MAX_FLAGS, SharedMemoryGroup
from paceline.collectives.sum_tree import (
    ALIGNMENT_ELEMENTS,
    LeafPartition,
    TreeNode,
    find_split_leaf,
    round_up,
    tree_sum,
)
from paceline.collectives.torch_collectives import WaitFunction, all_gather_json

SMALL_TENSOR_DIVISOR = 4  # a tensor smaller than a fourth of a lane shares a chunk
TensorList = Sequence[Tensor | None]  # each tensor, dense; None: all zeros
Results = Sequence[Tensor | None]  # each tensor, dense; None: no rank has a value


@dataclass(frozen=True)
class TensorSegment:
    """Elements [start, stop) of tensor number `tensor`, in memory order."""

    tensor_index: int
    start: int
    stop: int

    def view_of(self, tensor: Tensor) -> Tensor:
        """(n,): a view of these elements."""
        return tensor.as_strided((self.stop - self.start,), (1,), tensor.storage_offset() + self.start)


class TensorChunk:
    """The data of one tick: one segment of a large tensor, or several small tensors."""

    def __init__(self, dtype: torch.dtype, segments: Sequence[TensorSegment]) -> None:
        self.dtype, self.segments = dtype, segments
        self.single_segment = segments[0] if len(segments) == 1 else None
        """the segment of a large tensor; None if the chunk has several tensors"""
        self.lengths = [segment.stop - segment.start for segment in segments]
        self.size = sum(self.lengths)

    @cached_property
    def tensor_selector(self) -> Callable[[Results], Results]:
        """Picks the tensors of its segments, at least two, out of a list of all tensors."""
        return itemgetter(*[segment.tensor_index for segment in self.segments])


def split_into_chunks(
    sizes: Sequence[int], dtypes: Sequence[torch.dtype], lane_sizes: Mapping[torch.dtype, int]
) -> list[TensorChunk]:
    """Split tensors of `sizes` elements into chunks. `lane_sizes`: the largest number of elements of a chunk."""
    chunks: list[TensorChunk] = []
    for dtype in dict.fromkeys(dtypes):
        room, small, used = lane_sizes[dtype], list[TensorSegment](), 0
        for number, size in enumerate(sizes):
            if dtypes[number] != dtype or size == 0:
                continue
            if size * SMALL_TENSOR_DIVISOR >= room:
                chunk_size = -(-size // -(-size // room) // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
                starts = range(0, size, chunk_size)
                chunks += [TensorChunk(dtype, [TensorSegment(number, at, min(at + chunk_size, size))]) for at in starts]
                continue
            if used + size > room:
                chunks.append(TensorChunk(dtype, small))
                small, used = [], 0
            small.append(TensorSegment(number, 0, size))
            used += size
        if small:
            chunks.append(TensorChunk(dtype, small))
    return chunks


LaneAddress = tuple[int, int]  # the index of a rank, and of its lane
MAX_TENSORS = MAX_FLAGS


class ScratchBuffers:
    """Temporary memory of this rank, allocated once and reused."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, int], Tensor] = {}

    def take(self, dtype: torch.dtype, number: int, size: int) -> Tensor:
        """(size,), uninitialized: buffer `number` of this type."""
        buffer = self._buffers.get((dtype, number))
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[dtype, number] = torch.empty(size, dtype=dtype)
        return buffer if len(buffer) == size else buffer[:size]


class SlotBuffers:
    """Places lists of tensors, of the same sizes and types on all ranks, in the bulk slots of shared memory."""

    def __init__(
        self, memory: SharedMemoryGroup, sizes: Sequence[int], dtypes: Sequence[torch.dtype],
        lane_sizes: Mapping[torch.dtype, int], scratch: ScratchBuffers, layouts: Sequence[Layout] | None = None,
    ) -> None:  # fmt: skip
        """`lane_sizes`: elements of a lane by type, multiples of ALIGNED. Without `layouts`, tensors are (n,)."""
        self.chunks = split_into_chunks(sizes, dtypes, lane_sizes)
        self._layouts = layouts or [((size,), (1,)) for size in sizes]
        self.place = cache(self._place)  # each view is a torch operation
        self._memory, self._sizes, self._dtypes, self._lane_sizes = memory, sizes, dtypes, lane_sizes
        self._scratch = scratch

    def encode_used_flags(self, partials: Sequence[TensorList | None]) -> bytes:
        """One bit for each tensor: whether this rank has values."""
        flags = 0
        for flat in partials:
            if flat and all(map(is_present, flat)):
                flags = (1 << len(self._sizes)) - 1
                break
            for i, tensor in enumerate(flat or ()):
                if tensor is not None:
                    flags |= 1 << i
        return flags.to_bytes((len(self._sizes) + 7) // 8, "little")

    def read_used_flags(self) -> list[bool]:
        """For each tensor, whether any rank has values. Valid in the tick in which the flags were set."""
        used, count = 0, len(self._sizes)
        for flags in self._memory.bulk.flags(count):
            used |= flags
        return [bool(used >> i & 1) for i in range(count)]

    def allocate_results(
        self, partials: Sequence[TensorList | None], used: Callable[[], Sequence[bool]]
    ) -> list[Tensor | None]:
        """The tensors for the sums: those of the first subtree, or new ones if only other subtrees have values."""
        results = [*(partials[0] or [None] * len(self._sizes))]
        if not all(map(is_present, results)):
            for index, is_used in enumerate(used()):
                if is_used and results[index] is None:
                    results[index] = torch.empty_strided(*self._layouts[index], dtype=self._dtypes[index])
        return results

    def write_chunk(
        self, chunk: TensorChunk, partials: Sequence[TensorList | None], slot: int, *, for_others: bool = False
    ) -> None:
        """Write the chunk of each of this rank's subtrees into its lane.

        `for_others`: skip this rank's shard of a large tensor, which it reads in place.
        """
        only = chunk.single_segment
        start, stop = self.shard_range(chunk, self._memory.rank) if for_others else (0, 0)
        for lane, flat in enumerate(partials):
            target, pieces = self.place(chunk, slot, lane)
            if flat is None or (only is not None and flat[only.tensor_index] is None):
                target.zero_()
            elif only is not None and (tensor := flat[only.tensor_index]) is not None:
                part = only.view_of(tensor)
                target[:start].copy_(part[:start])
                target[stop:].copy_(part[stop:])
            else:
                foreach_copy(pieces, chunk.tensor_selector(flat))

    def exchange_chunk(
        self, chunk: TensorChunk | None, partials: Sequence[TensorList | None], *, is_first: bool
    ) -> int:
        """Run one tick that sends the chunk, and in the first tick the flags, of all ranks; return its slot."""
        slot = self._memory.bulk.begin_tick(self.encode_used_flags(partials) if is_first else b"")
        if chunk is not None:
            self.write_chunk(chunk, partials, slot)
        self._memory.bulk.publish_and_wait()
        return slot

    def subtree_views(
        self, lanes: Mapping[TreeNode, LaneAddress], chunk: TensorChunk, slot: int, start: int, stop: int
    ) -> dict[TreeNode, Tensor]:
        """Elements [start, stop) of the chunk for each subtree, in the memory of the ranks."""
        view, dtype, room = self._memory.bulk.view, chunk.dtype, self._lane_sizes[chunk.dtype]
        return {n: view(dtype, slot, r, lane * room + start, lane * room + stop) for n, (r, lane) in lanes.items()}

    def shard_range(self, chunk: TensorChunk, rank: int) -> tuple[int, int]:
        """The elements [start, stop) of the chunk that form the shard of a rank."""
        shard_size = -(-chunk.size // self._memory.size // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
        return min(rank * shard_size, chunk.size), min((rank + 1) * shard_size, chunk.size)

    def collect_results(self, chunk: TensorChunk, slot: int, at: int, results: Results) -> None:
        """Concatenate the sums of all ranks, each at element `at` of the rank's slot, into `results`."""
        shards = [self.shard_range(chunk, rank) for rank in range(self._memory.size)]
        view = self._memory.bulk.view
        parts = [view(chunk.dtype, slot, rank, at, at + stop - start) for rank, (start, stop) in enumerate(shards)]
        if (only := chunk.single_segment) is None:
            whole, pieces = self.place(chunk)
            torch.cat(parts, out=whole)
            foreach_copy(chunk.tensor_selector(results), pieces)
        elif (result := results[only.tensor_index]) is not None:
            torch.cat(parts, out=only.view_of(result))

    def _place(self, chunk: TensorChunk, slot: int | None = None, lane: int = 0) -> tuple[Tensor, list[Tensor]]:
        """Memory for a chunk, and for each tensor of several: in this rank's lane, or temporary without a `slot`."""
        start = lane * self._lane_sizes[chunk.dtype]
        if slot is None:
            flat = self._scratch.take(chunk.dtype, 0, chunk.size)
        else:
            flat = self._memory.bulk.view(chunk.dtype, slot, self._memory.rank, start, start + chunk.size)
        pairs = () if chunk.single_segment else zip(flat.split(chunk.lengths), chunk.segments, strict=True)
        return flat, [piece.as_strided(*self._layouts[segment.tensor_index]) for piece, segment in pairs]

    def spare_buffers(self, dtype: torch.dtype, count: int, size: int) -> list[Tensor]:
        """Temporary memory for `count` partial sums, (size,) each."""
        return [self._scratch.take(dtype, 1 + number, size) for number in range(count)]


def foreach_copy(targets: Results, sources: Results) -> None:
    """Copy tensors, in one call if there is no None: a source of zeros, or a target that is skipped."""
    try:
        torch._foreach_copy_(targets, sources)  # pyright: ignore
    except TypeError:  # torch does not accept None
        for target, source in zip(targets, sources, strict=True):
            if target is not None:
                target.copy_(torch.zeros(()) if source is None else source)


def assign_subtree_lanes(nodes: Iterable[Iterable[TreeNode]]) -> dict[TreeNode, LaneAddress]:
    """The lane of each subtree, given the subtrees of each rank."""
    return {node: (rank, lane) for rank, rank_nodes in enumerate(nodes) for lane, node in enumerate(rank_nodes)}


MAX_ELEMENT_BYTES = 8  # of an element
MAX_DIRECT_SUM_BYTES = 128 << 10  # up to this size, a second tick costs more time than the whole sum on each rank
TWO_SUBTREE_DIRECT_FACTOR = 8  # of MAX_DIRECT_SUM_BYTES, if there are only two subtrees


class TreeSum:
    """Sums lists of tensors over the leaves of a partition, again and again. Its constructor is not a collective."""

    def __init__(
        self, memory: SharedMemoryGroup, sizes: Sequence[int], dtypes: Sequence[torch.dtype],
        partition: LeafPartition, name: str = "gradients", layouts: Sequence[Layout] | None = None,
    ) -> None:  # fmt: skip
        """For up to `MAX_TENSORS` tensors with these sizes, types and layouts (default (n,)), the same on all ranks."""
        self._memory, self._leaves, self._sizes = memory, partition.leaf_count, sizes
        nodes = partition.subtrees_by_rank
        self._nodes, self._own_nodes = assign_subtree_lanes(nodes), nodes[memory.rank]
        self._spares = spare_buffer_count(self._nodes, self._leaves)
        lanes = max(map(len, nodes))
        total_bytes = sum(size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True))
        direct_bytes = MAX_DIRECT_SUM_BYTES * (TWO_SUBTREE_DIRECT_FACTOR if len(self._nodes) == 2 else 1)
        self._shards = memory.size if total_bytes > direct_bytes else 0
        lane_bytes = self._lane_bytes(lanes)
        # at the same byte for all types: a tick can contain a chunk of one type and sums of a different one
        self._results_at = {dtype: lanes * lane_bytes // dtype.itemsize for dtype in dtypes}
        lane_sizes = {dtype: lane_bytes // dtype.itemsize for dtype in dtypes}
        self._lanes = SlotBuffers(memory, sizes, dtypes, lane_sizes, ScratchBuffers(), layouts)
        self._parts = cache(partial(self._lanes.subtree_views, self._nodes))
        self._operation = memory.operation("all_reduce", name, *describe_tensors(sizes, dtypes))
        self.finite = False
        """True if the last sums are finite. False if that is unknown: near overflow, this may differ between ranks."""

    def run(self, partials: Sequence[TensorList | None], divisor: float | Tensor | None = None) -> list[Tensor | None]:
        """The sum over all leaves, divided by `buckets.divide` (a collective).

        `partials`: the sums of each of this rank's subtrees, which are overwritten. None: all zeros. Returns for each
        tensor that of the first subtree if there is one, overwritten by the sum. None if it is None in all subtrees of
        all ranks.
        """
        self.finite = False
        if isinstance(divisor, float) and divisor == 1.0:
            divisor = None
        with self._operation:
            return (self._run_sharded if self._shards else self._run_direct)(partials, divisor)

    def _run_direct(self, partials: Sequence[TensorList | None], divisor: float | Tensor | None):
        lanes, results, finite = self._lanes, list[Tensor | None](), True
        for number, chunk in enumerate(lanes.chunks or [None]):
            slot = lanes.exchange_chunk(chunk, partials, is_first=number == 0)
            if number == 0:
                results = lanes.allocate_results(partials, lanes.read_used_flags)
            if chunk is not None:
                finite = self._add_up(chunk, slot, results, divisor) and finite
        self.finite = finite
        return results

    def _run_sharded(self, partials: Sequence[TensorList | None], divisor: float | Tensor | None):
        # tick k sends chunk k, and the sums of chunk k - 1
        bulk, lanes, results, finite = self._memory.bulk, self._lanes, list[Tensor | None](), True
        for number in range(len(lanes.chunks) + 1):
            slot = bulk.begin_tick(lanes.encode_used_flags(partials) if number == 0 else b"")
            if number < len(lanes.chunks):
                lanes.write_chunk(lanes.chunks[number], partials, slot, for_others=True)
            if number > 0:
                finite &= self._add_shard(lanes.chunks[number - 1], partials, slot, divisor)
            if number == len(lanes.chunks):
                bulk.set_flags(slot, bytes([not finite]))
            bulk.publish_and_wait()
            if number == 0:
                results = lanes.allocate_results(partials, lanes.read_used_flags)
            else:
                chunk = lanes.chunks[number - 1]
                lanes.collect_results(chunk, slot, self._results_at[chunk.dtype], results)
        self.finite = not any(bulk.flags(1))
        return results

    def _lane_bytes(self, lanes: int) -> int:
        shards = max(1, self._shards)
        unit = ALIGNMENT_ELEMENTS * MAX_ELEMENT_BYTES * shards
        # the lanes, and one shard for the result
        return self._memory.bulk.data_bytes * shards // (lanes * shards + (self._shards > 0)) // unit * unit

    def _add_up(self, chunk: TensorChunk, slot: int, results: Results, divisor: float | Tensor | None) -> bool:
        """Compute the chunk's sums. True if they are finite, False if unknown."""
        parts = self._parts(chunk, slot, 0, chunk.size)
        if (only := chunk.single_segment) is None:
            whole, pieces = self._lanes.place(chunk)
            self._make_root(chunk, 0, parts, whole, divisor)
            foreach_copy(chunk.tensor_selector(results), pieces)
        elif (result := results[only.tensor_index]) is not None:
            whole = only.view_of(result)
            self._make_root(chunk, 0, parts, whole, divisor)
        else:
            return True
        return has_finite_sum(whole)

    def _add_shard(
        self, chunk: TensorChunk, partials: Sequence[TensorList | None], slot: int, divisor: float | Tensor | None
    ) -> bool:
        """Compute this rank's shard. True if it is finite (checked while it is in the cache), False if unknown."""
        start, stop = self._lanes.shard_range(chunk, self._memory.rank)
        if start == stop:
            return True
        at, only = self._results_at[chunk.dtype], chunk.single_segment
        out = self._memory.bulk.view(chunk.dtype, slot, self._memory.rank, at, at + stop - start)
        parts = dict(self._parts(chunk, 1 - slot, start, stop))
        for node, flat in zip(self._own_nodes, partials, strict=True):
            if only is not None and flat is not None and (tensor := flat[only.tensor_index]) is not None:
                parts[node] = only.view_of(tensor)[start:stop]
        self._make_root(chunk, start, parts, out, divisor)
        return has_finite_sum(out)

    def _make_root(
        self, chunk: TensorChunk, start: int, parts: dict[TreeNode, Tensor], out: Tensor, divisor: float | Tensor | None
    ) -> None:
        del start  # for subclasses
        spare = self._lanes.spare_buffers(chunk.dtype, self._spares, out.numel()) if self._spares else []
        sum_subtrees(parts, self._leaves, out, spare, divisor)


def has_finite_sum(values: Tensor) -> bool:
    """False if a value is an infinity or NaN, or if the sum of finite values overflows."""
    return math.isfinite(values.sum(dtype=torch.float32 if values.element_size() < 4 else None))


def describe_tensors(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> tuple[str, str]:
    """The shape and the types of a list of tensors, for the hang guard."""
    return f"[{sum(sizes)}]", ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))


def spare_buffer_count(parts: Collection[TreeNode], leaves: int) -> int:
    """The number of temporary sums that `sum_subtrees` needs for these subtrees, besides its result."""
    return max(1, _live_sums(parts, (0, leaves))) - 1


def _live_sums(parts: Collection[TreeNode], node: TreeNode) -> int:
    """The largest number of sums in memory at the same time during the computation of `node`, including its sum."""
    if node in parts:
        return 0
    split = find_split_leaf(node)
    left, right = _live_sums(parts, (node[0], split)), _live_sums(parts, (split, node[1]))
    return max(left, right + min(left, 1), 1)  # the left sum is kept while the right one is computed


def sum_subtrees(
    parts: dict[TreeNode, Tensor], leaves: int, out: Tensor, spare: list[Tensor], divisor: float | Tensor | None
) -> None:
    """Write the tree's sum of two or more parts into `out`. The parts do not change."""
    free, own_ids = [*spare, out], set[int]()

    def add(left: Tensor, right: Tensor) -> Tensor:
        if id(left) in own_ids:
            if id(right) in own_ids:
                free.append(right)
            target = left
        elif id(right) in own_ids:
            target = right
        else:
            target = free.pop()  # `out` first: it holds the leftmost sum, which becomes the root
            own_ids.add(id(target))
        return torch.add(left, right, out=target)

    root = torch.add(*parts.values(), out=out) if len(parts) == 2 else tree_sum(parts, add, leaves)
    assert root is out
    if divisor is not None:
        divide(out, divisor)


SEGMENT_BYTES = 1 << 20  # gloo's maximum


def gloo_ring_part_size(size: int, itemsize: int, ranks: int) -> int:
    """The number of elements in each part of gloo's all-reduce of `size` elements. The last parts may be shorter."""
    longest = SEGMENT_BYTES // itemsize
    segments = round_up(max(-(-size // longest), 2 * ranks), ranks)
    return segments // ranks * -(-size // segments)


def ring_sum(of_rank: Sequence[Tensor], first: int, size: int, out: Tensor) -> None:
    """Elements [first, first + len(out)) of a sum of tensors of `size` elements, in the order of gloo's all-reduce.

    gloo splits a tensor into one part for each rank. Part p starts at rank p - 1 and moves to the next lower rank. Each
    rank adds its values to the received part. With 4 ranks:

        part 0    x0 + (x1 + (x2 + x3))
        part 1    x1 + (x2 + (x3 + x0))    and so on

    Source: `ring` in gloo/allreduce.cc, the algorithm that torch uses. See tests/collectives/test_ring.py.
    """
    ranks, low = len(of_rank), 0
    part_size = gloo_ring_part_size(size, out.element_size(), ranks)
    while low < len(out):
        number, within = divmod(first + low, part_size)
        high = min(len(out), low + part_size - within)
        total = of_rank[number - 1][low:high]
        for back in range(2, ranks + 1):
            total = torch.add(of_rank[(number - back) % ranks][low:high], total, out=out[low:high])
        low = high


def barrier(memory: SharedMemoryGroup) -> None:
    with memory.operation("barrier", "barrier"):
        memory.bulk.begin_tick()
        memory.bulk.publish_and_wait()


def broadcast_in_memory(
    memory: SharedMemoryGroup, tensors: Sequence[Tensor], src: int = 0, name: str = "broadcast"
) -> None:
    """Copy the tensors of rank `src`, contiguous and of any type, into those of all ranks."""
    flat = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
    sizes, bulk, is_source = [len(tensor) for tensor in flat], memory.bulk, memory.rank == src
    slots = bulk.slots_as(torch.uint8)
    chunks = split_into_chunks(
        sizes, [torch.uint8] * len(flat), {torch.uint8: bulk.data_bytes // ALIGNMENT_ELEMENTS * ALIGNMENT_ELEMENTS}
    )
    with memory.operation("broadcast", name, f"[{sum(sizes)}]", "bytes"):
        for chunk in chunks or [TensorChunk(torch.uint8, [])]:  # at least one tick, which compares the calls
            slot = bulk.begin_tick()
            in_slot = slots[slot][src][: chunk.size].split(chunk.lengths)
            in_place = [flat[segment.tensor_index][segment.start : segment.stop] for segment in chunk.segments]
            if is_source:
                for target, values in zip(in_slot, in_place, strict=True):
                    target.copy_(values)
            bulk.publish_and_wait()
            if not is_source:
                for values, target in zip(in_slot, in_place, strict=True):
                    target.copy_(values)


def all_gather(memory: SharedMemoryGroup, mine: Tensor, out: Tensor, name: str = "shards") -> None:
    """All-gather: `mine` (s,) of rank r becomes `out`[r * s : (r + 1) * s]. `mine` may be this rank's part of `out`."""
    size, bulk = len(mine), memory.bulk
    slots, room = bulk.slots_as(mine.dtype), bulk.data_bytes // mine.element_size()
    parts = out.view(memory.size, size)
    with memory.operation("all_gather", name, f"[{size}]", mine.dtype):
        for start in range(0, size, room):
            stop = min(start + room, size)
            slot = bulk.begin_tick()
            slots[slot][memory.rank][: stop - start] = mine[start:stop]
            bulk.publish_and_wait()
            for rank, part in enumerate(parts):
                if rank != memory.rank or mine.data_ptr() != part.data_ptr():
                    part[start:stop] = slots[slot][rank][: stop - start]


def start_all_gather(memory: SharedMemoryGroup, mine: Tensor, name: str) -> WaitFunction:
    """All-gather of `mine`, (n,) on all ranks. The returned function returns (ranks, n)."""
    rows = mine.new_empty(memory.size, len(mine))
    all_gather(memory, mine, rows.view(-1), name)
    return lambda: rows


def all_gather_object(memory: SharedMemoryGroup, value: Any, name: str) -> list[Any]:
    """The `value` (JSON) of all ranks that share memory, by rank."""
    return all_gather_json(value, memory.size, name=name, start=partial(start_all_gather, memory))


def reduce_scatter(
    memory: SharedMemoryGroup, partials: Sequence[Tensor | None], partition: LeafPartition, out: Tensor,
    name: str = "gradients", *, as_gloo: bool = False,
) -> Tensor:  # fmt: skip
    """Reduce-scatter over all leaves, in the tree's order. Returns `out`, (n / W,): this rank's elements of the sum.

    `partials`: (n,) for each of this rank's subtrees, which do not change. None: all zeros. `as_gloo`: add in the order
    of gloo's reduce_scatter (see `ring_sum`). Each rank then has one leaf.
    """
    nodes, bulk, shard_size = partition.subtrees_by_rank, memory.bulk, len(out)
    lanes, size = max(map(len, nodes)), memory.size
    slots = bulk.slots_as(out.dtype)
    room = bulk.data_bytes // out.element_size() // (lanes * size) // ALIGNMENT_ELEMENTS * ALIGNMENT_ELEMENTS
    spare = [torch.empty_like(out[:room]) for _ in range(spare_buffer_count([*chain(*nodes)], partition.leaf_count))]
    shards = [None if flat is None else flat.view(size, shard_size) for flat in partials]
    with memory.operation("reduce_scatter", name, f"[{shard_size * size}]", out.dtype):
        for start in range(0, shard_size, room):
            stop = min(start + room, shard_size)
            slot = bulk.begin_tick()
            mine = slots[slot][memory.rank][: lanes * size * room].view(lanes, size, room)[:, :, : stop - start]
            for lane, flat in enumerate(shards):
                for rank, target in enumerate(mine[lane]):
                    if flat is None:
                        target.zero_()
                    elif rank != memory.rank:  # this rank's shard is read in place
                        target.copy_(flat[rank, start:stop])
            bulk.publish_and_wait()
            parts = {
                node: slots[slot][rank][(at := (lane * size + memory.rank) * room) : at + stop - start]
                for rank, rank_nodes in enumerate(nodes)
                for lane, node in enumerate(rank_nodes)
            }
            for node, flat in zip(nodes[memory.rank], shards, strict=True):
                if flat is not None:
                    parts[node] = flat[memory.rank, start:stop]
            total = out[start:stop]
            if as_gloo and size > 2:  # a sum of two has one order
                ring_sum([*parts.values()], memory.rank * shard_size + start, size * shard_size, total)
            else:
                sum_subtrees(parts, partition.leaf_count, total, [buffer[: stop - start] for buffer in spare], None)
    return out


class AsyncAllReduce:
    """A small asynchronous all-reduce in shared memory. The hang guard uses it like torch's `Work`."""

    def __init__(self, memory: SharedMemoryGroup, numbers: Sequence[float], name: str) -> None:
        """Start it with this rank's `numbers`."""
        self._memory, self._size, self._sums = memory, len(numbers), list[float]()
        self._is_over, self._error = False, ""
        if memory.running is not None:  # the next tick overwrites its slots
            memory.running.finish()
        channel = memory.totals
        operation = memory.operation("all_reduce", name, f"[{self._size}]", torch.float64, channel=channel)
        operation.work = self
        with operation:
            slot = channel.begin_tick()
            channel.floats[slot][memory.rank][: self._size] = array("d", numbers)
            self._tick = channel.publish()
            memory.running = self

    def is_completed(self) -> bool:
        """Whether all ranks have started it, or it has failed."""
        return self._is_over or bool(self._error) or self._memory.totals.have_all_published(self._tick)

    def finish(self) -> list[float]:
        """Wait, and return the sums, added in the order of ranks."""
        if self._is_over:
            return self._sums
        if self._error:
            raise RuntimeError(f"this sum has already failed: {self._error}")
        memory, channel = self._memory, self._memory.totals
        try:
            channel.wait()
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
            memory.mark_as_left()
            raise
        first, *others = channel.floats[self._tick & 1]
        sums: Iterable[float] = first[: self._size]
        for of_rank in others:
            sums = map(add, sums, of_rank)
        self._sums, self._is_over, memory.running = [*sums], True, None
        return self._sums
