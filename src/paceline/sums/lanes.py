"""Lists of tensors go into the memory of ranks that share it, and their sums out of it, chunk by chunk.

Each rank has one list of tensors or more to add, as many as it owns subtrees. In its slot these lie side by side, each
in a lane of its own:

    slot of rank 1     | lane 0: its first subtree's piece | lane 1: its second subtree's piece | ...
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.sums.channel import MAX_FLAGS
from paceline.sums.chunks import Chunk, cut
from paceline.sums.shared import SharedMemory
from paceline.sums.tree import ALIGNED, Node

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
