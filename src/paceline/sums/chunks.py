"""Many tensors of all sizes are cut into pieces that pass through memory of a fixed size, with few calls for each.

A large tensor is cut into equal pieces, each a chunk of its own, which is summed right where it lies. Small ones travel
together, as many as there is room for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from paceline.sums.tree import ALIGNED

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
