"""Sums of lists of tensors over ranks that share memory, in the order of `tree`, right where the tensors lie.

Chunk by chunk, each rank copies what others shall add into its memory. Then either everybody adds up all of it (where
that is little), or each rank adds up its share of the chunk and hands that out, in the tick in which the next chunk
comes in. Nothing is made flat first: what autograd hands out as .grad is read, and written, once.
"""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from paceline.ladder import middle
from paceline.sums.buckets import divide
from paceline.sums.chunks import Chunk
from paceline.sums.lanes import Flat, Lanes, Results, Scratch, by_node, hand_out
from paceline.sums.shared import SharedMemory
from paceline.sums.tree import ALIGNED, Forest, Node, tree_sum

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
        """For tensors of `sizes` elements and these types, the same on all ranks; at most `lanes.MAX_TENSORS`."""
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
