"""Sums of lists of tensors over ranks that share memory.

Many tensors of all sizes are cut into pieces that pass through memory of a fixed size, with few calls for each.

A large tensor is cut into equal pieces, each a chunk of its own, which is summed right where it lies. Small ones travel
together, as many as there is room for.

Lists of tensors go into the memory of ranks that share it, and their sums out of it, chunk by chunk.

Each rank has one list of tensors or more to add, as many as it owns subtrees. In its slot these lie side by side, each
in a lane of its own:

    slot of rank 1     | lane 0: its first subtree's piece | lane 1: its second subtree's piece | ...

Sums of lists of tensors over ranks that share memory, in the order of `tree`, right where the tensors lie.

Chunk by chunk, each rank copies what others shall add into its memory. Then either everybody adds up all of it (where
that is little), or each rank adds up its share of the chunk and hands that out, in the tick in which the next chunk
comes in. Nothing is made flat first: what autograd hands out as .grad is read, and written, once.

Sums in shared memory in the order in which gloo's all-reduce adds: its bits, at every number of ranks.

gloo cuts a tensor into as many parts as there are ranks. Part p starts at rank p - 1 and goes round downwards, and each
rank adds its own to what comes. So of 4 ranks

    part 0    x0 + (x1 + (x2 + x3))
    part 1    x1 + (x2 + (x3 + x0))    and so on

Source: `ring` in gloo/allreduce.cc, the algorithm that torch takes. See tests/collectives/test_ring.py.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.collectives.buckets import divide
from paceline.collectives.memory import MAX_FLAGS, SharedMemory
from paceline.collectives.tree import ALIGNED, Forest, Node, middle, round_up, tree_sum

SMALL_SHARE = 4  # a tensor of less than a fourth of the room travels with others


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of tensor number `tensor`."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """What passes at once: one piece of a large tensor, or several whole small ones."""

    dtype: torch.dtype
    pieces: tuple[Segment, ...]

    @property
    def only(self) -> Segment | None:
        """The piece of a large tensor that is a chunk of its own."""
        return self.pieces[0] if len(self.pieces) == 1 else None

    @cached_property
    def lengths(self) -> list[int]:
        """Of each piece, in elements."""
        return [piece.stop - piece.start for piece in self.pieces]

    @cached_property
    def size(self) -> int:
        """Elements."""
        return sum(self.lengths)


def cut(sizes: Sequence[int], dtypes: Sequence[torch.dtype], rooms: Mapping[torch.dtype, int]) -> list[Chunk]:
    """Chunks that together hold each element once; empty tensors are in none.

    Args:
        sizes: of the tensors, in elements.
        dtypes: of each.
        rooms: for each type, how many elements pass at once, a multiple of ALIGNED.
    """
    chunks: list[Chunk] = []
    for dtype in dict.fromkeys(dtypes):
        room, together, used = rooms[dtype], list[Segment](), 0
        for number, size in enumerate(sizes):
            if dtypes[number] != dtype or size == 0:
                continue
            if size * SMALL_SHARE >= room:
                chunks += [Chunk(dtype, (Segment(number, *part),)) for part in _parts(size, room)]
                continue
            if used + size > room:
                chunks.append(Chunk(dtype, tuple(together)))
                together, used = [], 0
            together.append(Segment(number, 0, size))
            used += size
        if together:
            chunks.append(Chunk(dtype, tuple(together)))
    return chunks


def _parts(size: int, room: int) -> list[tuple[int, int]]:
    count = -(-size // room)
    each = -(-size // count // ALIGNED) * ALIGNED
    return [(start, min(start + each, size)) for start in range(0, size, each)]


Flat = Sequence[Tensor | None]
"""(n,) for each tensor, None where it is all zeros"""
Results = Sequence[Tensor | None]
"""(n,) for each tensor, None where nobody has anything to add"""
Lane = tuple[int, int]
"""the rank among those who share memory, and the number of its lane"""
MAX_TENSORS = MAX_FLAGS


class Scratch:
    """Memory of this rank alone, made once and used again and again, for one thing at a time."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.dtype, int], Tensor] = {}

    def take(self, dtype: torch.dtype, number: int, size: int) -> Tensor:
        """(size,): piece `number` of this type, with whatever is in it."""
        made = self._made.get((dtype, number))
        if made is None or len(made) < size:
            made = self._made[dtype, number] = torch.empty(size, dtype=dtype)
        return made[:size]


class Lanes:
    """Lists of tensors, the same sizes and types on all ranks, in the bulk slots of memory that ranks share."""

    def __init__(
        self,
        memory: SharedMemory,
        sizes: Sequence[int],
        dtypes: Sequence[torch.dtype],
        rooms: Mapping[torch.dtype, int],
        scratch: Scratch,
    ) -> None:
        """`rooms`: for each type, the elements of a lane, a multiple of ALIGNED."""
        self.chunks = cut(sizes, dtypes, rooms)
        self._memory, self._sizes, self._dtypes, self._rooms = memory, sizes, dtypes, rooms
        self._scratch = scratch

    def set_flags(self, slot: int, own: Sequence[Flat | None]) -> None:
        """Say which tensors this rank has something to add to."""
        count = len(self._sizes)
        flags = sum(1 << i for i in range(count) if any(flat is not None and flat[i] is not None for flat in own))
        self._memory.bulk.set_flags(slot, flags, count)

    def used(self) -> list[bool]:
        """Which tensors any rank that shares the memory has something to add to, in the tick that set flags."""
        used, count = 0, len(self._sizes)
        for flags in self._memory.bulk.flags(count):
            used |= flags
        return [bool(used >> i & 1) for i in range(count)]

    def results(self, own: Sequence[Flat | None], used: Sequence[bool]) -> list[Tensor | None]:
        """Where the sums go: where the first subtree's are, new where only others have something to add."""
        first: Flat = own[0] or [None] * len(self._sizes)
        return [
            flat if flat is not None or not used[i] else torch.empty(self._sizes[i], dtype=self._dtypes[i])
            for i, flat in enumerate(first)
        ]

    def load(
        self,
        chunk: Chunk,
        own: Sequence[Flat | None],
        slot: int,
        *,
        for_others: bool = False,
        factor: float | None = None,
    ) -> None:
        """Write the chunk of each of this rank's subtrees into its lane, multiplied by `factor`.

        With `for_others` without the share that this rank itself adds up, where it can read that where it is: in the
        piece of a large tensor that is there, and is added as it is.
        """
        mine = self._memory.bulk.typed(chunk.dtype)[slot][self._memory.rank]
        room, only = self._rooms[chunk.dtype], chunk.only
        start, stop = self.share(chunk, self._memory.rank) if for_others else (0, 0)
        for lane, flat in enumerate(own):
            place = mine[lane * room : lane * room + chunk.size]
            if flat is None or (only is not None and flat[only.tensor] is None):
                place.zero_()
            elif only is not None and (tensor := flat[only.tensor]) is not None:
                part = tensor[only.start : only.stop]
                if factor is not None:
                    torch.mul(part, factor, out=place)
                    continue
                place[:start].copy_(part[:start])
                place[stop:].copy_(part[stop:])
            else:
                torch.cat(
                    [_or_zeros(flat[p.tensor], mine, n) for p, n in zip(chunk.pieces, chunk.lengths, strict=True)],
                    out=place,
                )
                if factor is not None:
                    place.mul_(factor)

    def parts(self, lanes: Mapping[Node, Lane], chunk: Chunk, slot: int, start: int, stop: int) -> dict[Node, Tensor]:
        """Elements [start, stop) of the chunk, of these subtrees; they are other ranks' memory."""
        slots, room = self._memory.bulk.typed(chunk.dtype)[slot], self._rooms[chunk.dtype]
        return {node: slots[rank][lane * room + start : lane * room + stop] for node, (rank, lane) in lanes.items()}

    def share(self, chunk: Chunk, rank: int) -> tuple[int, int]:
        """Which elements of the chunk a rank adds up, where each does its share."""
        each = -(-chunk.size // self._memory.size // ALIGNED) * ALIGNED
        return min(rank * each, chunk.size), min((rank + 1) * each, chunk.size)

    def take(self, chunk: Chunk, slot: int, at: int, results: Results) -> None:
        """Put together what each rank has added up, its share, written at element `at` of its slot."""
        slots = self._memory.bulk.typed(chunk.dtype)[slot]
        shares = [self.share(chunk, rank) for rank in range(self._memory.size)]
        parts = [slots[rank][at : at + stop - start] for rank, (start, stop) in enumerate(shares)]
        if (only := chunk.only) is None:
            whole = self.whole(chunk)
            torch.cat(parts, out=whole)
            hand_out(whole, chunk, results)
        elif (result := results[only.tensor]) is not None:
            torch.cat(parts, out=result[only.start : only.stop])

    def whole(self, chunk: Chunk) -> Tensor:
        """Memory of this rank alone, for a chunk of many tensors."""
        return self._scratch.take(chunk.dtype, 0, chunk.size)

    def spare(self, dtype: torch.dtype, count: int, size: int) -> list[Tensor]:
        """Memory of this rank alone, for `count` sums that are half added up, (size,) each."""
        return [self._scratch.take(dtype, 1 + number, size) for number in range(count)]


def hand_out(whole: Tensor, chunk: Chunk, results: Results) -> None:
    """Give each tensor of the chunk its piece of `whole`."""
    pairs = [
        (result, part)
        for piece, part in zip(chunk.pieces, whole.split(chunk.lengths), strict=True)
        if (result := results[piece.tensor]) is not None
    ]
    if pairs:
        targets, parts = map(list, zip(*pairs, strict=True))
        torch._foreach_copy_(targets, parts)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def by_node(nodes: Iterable[Iterable[Node]]) -> dict[Node, Lane]:
    """In which lane each subtree lies, of the subtrees of each rank."""
    return {node: (rank, lane) for rank, of_rank in enumerate(nodes) for lane, node in enumerate(of_rank)}


def _or_zeros(part: Tensor | None, like: Tensor, size: int) -> Tensor:
    return like.new_zeros(size) if part is None else part


WIDEST_BYTES = 8  # of an element
DIRECT_BYTES = 128 << 10  # up to here another tick costs more than to add up everything everywhere
DIRECT_FACTOR = 8  # so many times as much, where only two are added


class TreeSum:
    """One sum of lists of tensors over the leaves of a forest, again and again. A new one is no collective."""

    def __init__(
        self,
        memory: SharedMemory,
        sizes: Sequence[int],
        dtypes: Sequence[torch.dtype],
        forest: Forest,
        name: str = "gradients",
    ) -> None:
        """For tensors of `sizes` elements and these types, the same on all ranks; at most `MAX_TENSORS`."""
        self._memory, self._leaves, self._sizes = memory, forest.leaves, sizes
        nodes = forest.nodes()
        self._nodes, self._own_nodes = by_node(nodes), nodes[memory.rank]
        self._spares = spare_count(self._nodes, self._leaves)
        lanes = max(map(len, nodes))
        total_bytes = sum(size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True))
        direct_bytes = DIRECT_BYTES * (DIRECT_FACTOR if len(self._nodes) == 2 else 1)
        self._shares = memory.size if total_bytes > direct_bytes else 0
        lane_bytes = self._lane_bytes(lanes)
        # at the same byte for all types: the tick that brings in a chunk of one hands out sums of another
        self._results_at = {dtype: lanes * lane_bytes // dtype.itemsize for dtype in dtypes}
        rooms = {dtype: lane_bytes // dtype.itemsize for dtype in dtypes}
        self._lanes = Lanes(memory, sizes, dtypes, rooms, Scratch())
        self._call = memory.called("all_reduce", name, *in_words(sizes, dtypes))
        self.finite = False
        """Whether the last sums are known to hold no infinity or NaN, on all ranks alike; False: nobody has looked."""

    def run(
        self, own: Sequence[Flat | None], divisor: float | Tensor | None = None, *, factor: float | None = None
    ) -> list[Tensor | None]:
        """The sum over all leaves, divided as `buckets.divide` does (a collective).

        Args:
            own: for each of this rank's subtrees its sums, contiguous; None for all zeros. They are written over.
            divisor: see `divide`; the same on every rank.
            factor: what each element of ours is multiplied by before it is added.

        Returns:
            (n,) for each tensor: that of the first subtree, if it is there, with the sum in it. None where it is None
            in all subtrees of all ranks.
        """
        self.finite = False
        with self._memory.operation(self._memory.bulk, self._call):
            return (self._run_shares if self._shares else self._run_direct)(own, divisor, factor)

    def _run_direct(self, own: Sequence[Flat | None], divisor: float | Tensor | None, factor: float | None):
        bulk, lanes, results = self._memory.bulk, self._lanes, list[Tensor | None]()
        for number, chunk in enumerate(lanes.chunks or [None]):
            slot = bulk.write()
            if number == 0:
                lanes.set_flags(slot, own)
            if chunk is not None:
                lanes.load(chunk, own, slot, factor=factor)
            bulk.publish()
            bulk.wait()
            if number == 0:
                results = lanes.results(own, lanes.used())
            if chunk is not None:
                self._add_up(chunk, slot, results, divisor)
        return results

    def _run_shares(self, own: Sequence[Flat | None], divisor: float | Tensor | None, factor: float | None):
        """In tick k chunk k comes in, shares of chunk k - 1 are added up and go out: one tick for each chunk."""
        bulk, lanes, results, finite = self._memory.bulk, self._lanes, list[Tensor | None](), True
        for number in range(len(lanes.chunks) + 1):
            slot = bulk.write()
            if number == 0:
                lanes.set_flags(slot, own)
            if number < len(lanes.chunks):
                lanes.load(lanes.chunks[number], own, slot, for_others=True, factor=factor)
            if number > 0:
                # with a factor ours is in memory, too: what lies here is without it
                here = own if factor is None else [None] * len(own)
                finite &= self._add_share(lanes.chunks[number - 1], here, slot, divisor)
            if number == len(lanes.chunks):
                bulk.set_flags(slot, not finite, 1)
            bulk.publish()
            bulk.wait()
            if number == 0:
                results = lanes.results(own, lanes.used())
            else:
                chunk = lanes.chunks[number - 1]
                lanes.take(chunk, slot, self._results_at[chunk.dtype], results)
        self.finite = not any(bulk.flags(1))
        return results

    def _lane_bytes(self, lanes: int) -> int:
        all_bytes, unit = self._memory.bulk.data_bytes, ALIGNED * WIDEST_BYTES * max(1, self._shares)
        if self._shares:  # lanes, and the share of the result
            return all_bytes * self._shares // (lanes * self._shares + 1) // unit * unit
        return all_bytes // lanes // unit * unit

    def _add_up(self, chunk: Chunk, slot: int, results: Results, divisor: float | Tensor | None) -> None:
        parts = self._lanes.parts(self._nodes, chunk, slot, 0, chunk.size)
        if (only := chunk.only) is None:
            whole = self._lanes.whole(chunk)
            self._make_root(chunk, 0, parts, whole, divisor)
            hand_out(whole, chunk, results)
        elif (result := results[only.tensor]) is not None:
            self._make_root(chunk, 0, parts, result[only.start : only.stop], divisor)

    def _add_share(self, chunk: Chunk, own: Sequence[Flat | None], slot: int, divisor: float | Tensor | None) -> bool:
        """Whether the sum is finite, found out while it is still in the cache; False: it may be."""
        start, stop = self._lanes.share(chunk, self._memory.rank)
        if start == stop:
            return True
        at, only = self._results_at[chunk.dtype], chunk.only
        out = self._memory.bulk.typed(chunk.dtype)[slot][self._memory.rank][at : at + stop - start]
        parts = self._lanes.parts(self._nodes, chunk, 1 - slot, start, stop)
        for node, flat in zip(self._own_nodes, own, strict=True):
            if only is not None and flat is not None and (tensor := flat[only.tensor]) is not None:
                parts[node] = tensor[only.start + start : only.start + stop]
        self._make_root(chunk, start, parts, out, divisor)
        # never finite where one element is not; it may overflow by itself
        return math.isfinite(out.sum(dtype=torch.float32 if out.element_size() < 4 else None))

    def _make_root(
        self, chunk: Chunk, start: int, parts: dict[Node, Tensor], out: Tensor, divisor: float | Tensor | None
    ) -> None:
        """The sum of these parts, which begin at element `start` of the chunk, in `out`."""
        del start
        root_of(parts, self._leaves, out, self._lanes.spare(chunk.dtype, self._spares, len(out)), divisor)


def in_words(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> tuple[str, str]:
    """Shape and types of lists of tensors, for the hang guard."""
    return f"[{sum(sizes)}]", ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))


def spare_count(parts: Collection[Node], leaves: int) -> int:
    """How many sums have to wait, at most, to be added to another one, while these subtrees become one."""
    return max(1, _places(parts, (0, leaves))) - 1


def _places(parts: Collection[Node], node: Node) -> int:
    """How many sums there are at most while this one is made, itself included."""
    if node in parts:
        return 0
    cut = middle(node)
    left, right = _places(parts, (node[0], cut)), _places(parts, (cut, node[1]))
    return max(left, right + min(left, 1), 1)  # the left sum waits while the right one is made


def root_of(
    parts: dict[Node, Tensor], leaves: int, out: Tensor, spare: list[Tensor], divisor: float | Tensor | None
) -> None:
    """The tree's sum of two parts or more, in `out`; the parts are only read."""
    free, ours = [*spare, out], set[int]()

    def add(left: Tensor, right: Tensor) -> Tensor:
        if id(left) in ours:
            if id(right) in ours:
                free.append(right)
            target = left
        elif id(right) in ours:
            target = right
        else:
            target = free.pop()  # `out` first: it stays the leftmost sum, and so becomes the root
            ours.add(id(target))
        return torch.add(left, right, out=target)

    root = tree_sum(parts, add, leaves)
    assert root is out
    if divisor is not None:
        divide(out, divisor)


SEGMENT_BYTES = 1 << 20  # gloo's longest


def ring_part(size: int, itemsize: int, ranks: int) -> int:
    """How many of `size` elements are in each part, but the last ones, which may be shorter or empty."""
    longest = SEGMENT_BYTES // itemsize
    segments = round_up(max(-(-size // longest), 2 * ranks), ranks)
    return segments // ranks * -(-size // segments)


def ring_sum(of_rank: Sequence[Tensor], first: int, size: int, out: Tensor) -> None:
    """Elements [first, first + len(out)) of a sum over ranks; `size` is the length of the whole tensor."""
    ranks, low = len(of_rank), 0
    each = ring_part(size, out.element_size(), ranks)
    while low < len(out):
        number, within = divmod(first + low, each)
        high = min(len(out), low + each - within)
        total = of_rank[number - 1][low:high]
        for back in range(2, ranks + 1):
            total = torch.add(of_rank[(number - back) % ranks][low:high], total, out=out[low:high])
        low = high
