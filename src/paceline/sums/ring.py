"""Sums in shared memory in the order in which gloo's all-reduce adds: its bits, at every number of ranks.

gloo cuts a tensor into as many parts as there are ranks. Part p starts at rank p - 1 and goes round downwards, and each
rank adds its own to what comes. So of 4 ranks

    part 0    x0 + (x1 + (x2 + x3))
    part 1    x1 + (x2 + (x3 + x0))    and so on

Source: `ring` in gloo/allreduce.cc, the algorithm that torch takes. tests/sums/test_ring.py compares with torch's own.
"""

from collections.abc import Generator

import torch
from torch import Tensor

from paceline.sums.buckets import divide
from paceline.sums.chunks import Chunk
from paceline.sums.memory_sum import TreeSum
from paceline.sums.tree import Node, round_up

SEGMENT_BYTES = 1 << 20  # gloo's longest


def ring_part(size: int, itemsize: int, ranks: int) -> int:
    """How many of `size` elements are in each part, but the last ones, which may be shorter or empty."""
    longest = SEGMENT_BYTES // itemsize
    segments = round_up(max(-(-size // longest), 2 * ranks), ranks)
    return segments // ranks * -(-size // segments)


class RingSum(TreeSum):
    """As `TreeSum` over ranks that have a leaf each, but for the order of additions."""

    def _make_root(
        self, chunk: Chunk, start: int, parts: dict[Node, Tensor], out: Tensor, divisor: float | Tensor | None
    ) -> None:
        if len(parts) == 2:  # in either order the same
            super()._make_root(chunk, start, parts, out, divisor)
            return
        for low, high, first in self._turns(chunk, start, start + len(out)):
            *others, last = [parts[(first + k) % len(parts), (first + k) % len(parts) + 1] for k in range(len(parts))]
            total, place = last[low:high], out[low:high]
            for other in reversed(others):
                total = torch.add(other[low:high], total, out=place)
        if divisor is not None:
            divide(out, divisor)

    def _turns(self, chunk: Chunk, start: int, stop: int) -> Generator[tuple[int, int, int]]:
        """Elements [start, stop) of the chunk by parts: from where to where, counted from `start`, and which part."""
        at = 0
        for piece, length in zip(chunk.pieces, chunk.lengths, strict=True):
            each = ring_part(self._sizes[piece.tensor], chunk.dtype.itemsize, self._memory.size)
            low, end = max(start, at), min(stop, at + length)
            while low < end:
                element = piece.start + low - at
                number = element // each
                high = min(end, low + (number + 1) * each - element)
                yield low - start, high - start, number
                low = high
            at += length
