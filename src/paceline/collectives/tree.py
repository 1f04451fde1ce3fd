"""How do ranks that share memory add up lists of tensors, in the order of `scratch.tree`, and right where they lie?

Chunk by chunk, each rank copies what it has to add into its memory. Then either everybody adds up all of it (two terms,
or little to add), or each rank adds up its share of the chunk and hands that out, in the tick in which the next chunk
comes in. Nothing is made flat first: what autograd hands out as .grad is read, and written, once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.collectives.channel import MAX_FLAGS
from paceline.collectives.chunks import ALIGNED, Chunk, cut
from paceline.collectives.shared import SharedMemory, called
from paceline.scratch.reduce import divide
from paceline.scratch.tree import Forest, Node, tree_sum

Flat = Sequence[Tensor | None]
"""(n,) for each tensor, None where it is all zeros"""
DIRECT_BYTES = 128 << 10  # up to here another tick costs more than to add up everything everywhere


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
        self._memory, self._sizes, self._dtypes = memory, sizes, dtypes
        nodes = forest.nodes()
        self._leaves = forest.leaves
        self._lanes = [(rank, lane, node) for rank, of_rank in enumerate(nodes) for lane, node in enumerate(of_rank)]
        lanes = max(map(len, nodes))
        total_bytes = sum(size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True))
        self._shares = memory.size if len(self._lanes) > 2 and total_bytes > DIRECT_BYTES else 0
        self._rooms = {dtype: self._room(dtype, lanes) for dtype in dtypes}
        self._results_at = {dtype: lanes * room for dtype, room in self._rooms.items()}
        self._chunks = cut(sizes, dtypes, self._rooms)
        self._scratch: dict[torch.dtype, list[Tensor]] = {}
        types = ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        self._call = called("all_reduce", name, f"[{sum(sizes)}]", types)

    def run(self, own: Sequence[Flat | None], divisor: float | Tensor | None = None) -> list[Tensor | None]:
        """The sum over all leaves, divided as `scratch.reduce.divide` does (a collective).

        Args:
            own: for each of this rank's subtrees its sums, contiguous; None for all zeros. They are written over.
            divisor: see `divide`; the same on every rank.

        Returns:
            (n,) for each tensor: that of the first subtree, if it is there, with the sum in it. None where it is None
            in all subtrees of all ranks.
        """
        with self._memory.operation(self._memory.bulk, self._call):
            present = [any(flat is not None and flat[i] is not None for flat in own) for i in range(len(self._sizes))]
            return (self._run_shares if self._shares else self._run_direct)(own, present, divisor)

    def _run_direct(self, own: Sequence[Flat | None], present: list[bool], divisor: float | Tensor | None):
        bulk, results = self._memory.bulk, list[Tensor | None]()
        for number, chunk in enumerate(self._chunks or [None]):
            slot = bulk.write()
            if number == 0:
                self._set_flags(slot, present)
            if chunk is not None:
                self._load(chunk, own, slot)
            bulk.publish()
            bulk.wait()
            if number == 0:
                results = self._results(own)
            if chunk is not None:
                self._add_up(chunk, slot, results, divisor)
        return results

    def _run_shares(self, own: Sequence[Flat | None], present: list[bool], divisor: float | Tensor | None):
        """In tick k chunk k comes in, shares of chunk k - 1 are added up and go out: one tick for each chunk."""
        bulk, results = self._memory.bulk, list[Tensor | None]()
        for number in range(len(self._chunks) + 1):
            slot = bulk.write()
            if number == 0:
                self._set_flags(slot, present)
            if number < len(self._chunks):
                self._load(self._chunks[number], own, slot)
            if number > 0:
                self._add_share(self._chunks[number - 1], slot, divisor)
            bulk.publish()
            bulk.wait()
            if number == 0:
                results = self._results(own)
            else:
                self._take_shares(self._chunks[number - 1], slot, results)
        return results

    def _room(self, dtype: torch.dtype, lanes: int) -> int:
        elements, unit = self._memory.bulk.data_bytes // dtype.itemsize, ALIGNED * max(1, self._shares)
        if self._shares:  # lanes, and the share of the result
            return elements * self._shares // (lanes * self._shares + 1) // unit * unit
        return elements // lanes // unit * unit

    def _set_flags(self, slot: int, present: Sequence[bool]) -> None:
        flags = sum(1 << i for i, is_there in enumerate(present) if is_there)
        self._memory.bulk.set_flags(slot, flags, len(present))

    def _results(self, own: Sequence[Flat | None]) -> list[Tensor | None]:
        """Where the sums go: where the first subtree's are, new where another rank has something to add."""
        used = 0
        for flags in self._memory.bulk.flags(len(self._sizes)):
            used |= flags
        first: Flat = own[0] or [None] * len(self._sizes)
        return [
            flat if flat is not None or not used >> i & 1 else torch.empty(self._sizes[i], dtype=self._dtypes[i])
            for i, flat in enumerate(first)
        ]

    def _load(self, chunk: Chunk, own: Sequence[Flat | None], slot: int) -> None:
        mine, room, only = (
            self._memory.bulk.typed(chunk.dtype)[slot][self._memory.rank],
            self._rooms[chunk.dtype],
            chunk.only,
        )
        for lane, flat in enumerate(own):
            place = mine[lane * room : lane * room + chunk.size]
            if flat is None or (only is not None and flat[only.tensor] is None):
                place.zero_()
            elif only is not None and (tensor := flat[only.tensor]) is not None:
                place.copy_(tensor[only.start : only.stop])
            else:
                torch.cat(
                    [_or_zeros(flat[p.tensor], mine, n) for p, n in zip(chunk.pieces, chunk.lengths, strict=True)],
                    out=place,
                )

    def _lanes_of(self, chunk: Chunk, slot: int, start: int, stop: int) -> dict[Node, Tensor]:
        """Elements [start, stop) of the chunk, of all subtrees."""
        slots, room = self._memory.bulk.typed(chunk.dtype)[slot], self._rooms[chunk.dtype]
        return {node: slots[rank][lane * room + start : lane * room + stop] for rank, lane, node in self._lanes}

    def _add_up(self, chunk: Chunk, slot: int, results: Sequence[Tensor | None], divisor: float | Tensor | None):
        lanes, spare = self._lanes_of(chunk, slot, 0, chunk.size), self._spare(chunk.dtype, chunk.size)
        if (only := chunk.only) is None:
            whole = self._whole(chunk)
            root_of(lanes, self._leaves, whole, spare, divisor)
            _hand_out(whole, chunk, results)
        elif (result := results[only.tensor]) is not None:
            root_of(lanes, self._leaves, result[only.start : only.stop], spare, divisor)

    def _add_share(self, chunk: Chunk, slot: int, divisor: float | Tensor | None) -> None:
        start, stop = self._share(chunk, self._memory.rank)
        if start < stop:
            at = self._results_at[chunk.dtype]
            out = self._memory.bulk.typed(chunk.dtype)[slot][self._memory.rank][at : at + stop - start]
            lanes = self._lanes_of(chunk, 1 - slot, start, stop)
            root_of(lanes, self._leaves, out, self._spare(chunk.dtype, stop - start), divisor)

    def _take_shares(self, chunk: Chunk, slot: int, results: Sequence[Tensor | None]) -> None:
        slots, at = self._memory.bulk.typed(chunk.dtype)[slot], self._results_at[chunk.dtype]
        shares = [self._share(chunk, rank) for rank in range(self._memory.size)]
        parts = [slots[rank][at : at + stop - start] for rank, (start, stop) in enumerate(shares)]
        if (only := chunk.only) is None:
            whole = self._whole(chunk)
            torch.cat(parts, out=whole)
            _hand_out(whole, chunk, results)
        elif (result := results[only.tensor]) is not None:
            torch.cat(parts, out=result[only.start : only.stop])

    def _share(self, chunk: Chunk, rank: int) -> tuple[int, int]:
        each = -(-chunk.size // self._shares // ALIGNED) * ALIGNED
        return min(rank * each, chunk.size), min((rank + 1) * each, chunk.size)

    def _own_memory(self, dtype: torch.dtype) -> list[Tensor]:
        """Of this rank alone: for a chunk of many tensors, and for what is half added up."""
        if dtype not in self._scratch:
            count = 1 + spare_count(len(self._lanes))
            self._scratch[dtype] = [torch.empty(self._rooms[dtype], dtype=dtype) for _ in range(count)]
        return self._scratch[dtype]

    def _whole(self, chunk: Chunk) -> Tensor:
        return self._own_memory(chunk.dtype)[0][: chunk.size]

    def _spare(self, dtype: torch.dtype, size: int) -> list[Tensor]:
        return [own[:size] for own in self._own_memory(dtype)[1:]]


MAX_TENSORS = MAX_FLAGS


def _or_zeros(part: Tensor | None, like: Tensor, size: int) -> Tensor:
    return like.new_zeros(size) if part is None else part


def _hand_out(whole: Tensor, chunk: Chunk, results: Sequence[Tensor | None]) -> None:
    pairs = [
        (result, part)
        for piece, part in zip(chunk.pieces, whole.split(chunk.lengths), strict=True)
        if (result := results[piece.tensor]) is not None
    ]
    if pairs:
        targets, parts = map(list, zip(*pairs, strict=True))
        torch._foreach_copy_(targets, parts)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def spare_count(parts: int) -> int:
    """How many sums may wait to be added to another one, while `parts` parts become one."""
    return max(0, parts.bit_length() - 2)


def root_of(
    parts: dict[Node, Tensor], leaves: int, out: Tensor, spare: list[Tensor], divisor: float | Tensor | None
) -> None:
    """The tree's sum of two parts or more, in `out`; the parts are other ranks' memory, and only read."""
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
