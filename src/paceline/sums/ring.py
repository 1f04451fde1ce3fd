"""Sums in shared memory in the order in which gloo's all-reduce adds: its bits, at every number of ranks.

gloo cuts a tensor into as many parts as there are ranks. Part p starts at rank p - 1 and goes round downwards, and each
rank adds its own to what comes. So of 4 ranks

    part 0    x0 + (x1 + (x2 + x3))
    part 1    x1 + (x2 + (x3 + x0))    and so on

Source: `ring` in gloo/allreduce.cc, the algorithm that torch takes. tests/sums/test_ring.py compares with torch's own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.sums.tree import round_up

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
