"""Sums with the same *bits* on 1, 2, 3 or 4 ranks.

Floating-point addition rounds, so the order matters: (a + b) + c differs from a + (b + c) in the last bits, and each
number of ranks has its own natural order. Here the order is fixed before anybody asks how many ranks there are. The
leaves of one binary tree are the V *virtual ranks*; a rank owns a run of neighbouring leaves. It adds up the complete
subtrees among them, and what is left of the tree above is added from the subtrees of all ranks.

    V = 6, leaves a..f:  ((a+b) + (c+d)) + (e+f)

    1 rank  owns a..f            sends nothing: the whole tree is its own
    2 ranks own  a..c and d..f   the first has a+b and c, the second d and e+f
    3 ranks own  ab, cd, ef      a+b, c+d, e+f
    any of them finishes with    ((a+b) + (c+d)) + (e+f): the same additions in the same order

Run me: `torchrun --nproc-per-node 3 examples/textbook/tree.py`, or alone with `python`.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

Leaves = tuple[int, int]
"""[first, stop): a run of leaves, or the subtree that holds them."""


def halves(subtree: Leaves) -> tuple[Leaves, Leaves]:
    """A subtree of two leaves or more is cut at the largest power of two: halves((0, 6)) == ((0, 4), (4, 6))."""
    first, stop = subtree
    cut = first + (1 << ((stop - first - 1).bit_length() - 1))
    return (first, cut), (cut, stop)


def complete_subtrees(owned: Leaves, within: Leaves) -> list[Leaves]:
    """The largest ones in a run of leaves: complete_subtrees((0, 3), (0, 6)) == [(0, 2), (2, 3)]."""
    if owned[0] <= within[0] and within[1] <= owned[1]:
        return [within]
    if within[1] <= owned[0] or owned[1] <= within[0]:
        return []
    left, right = halves(within)
    return complete_subtrees(owned, left) + complete_subtrees(owned, right)


def add_up(subtree: Leaves, parts: Mapping[Leaves, Tensor]) -> Tensor:
    """The sum of a subtree from those of smaller ones, which together hold each of its leaves once."""
    if subtree in parts:
        return parts[subtree]
    left, right = halves(subtree)
    return add_up(left, parts) + add_up(right, parts)


def sum_over_leaves(mine: Mapping[Leaves, Tensor], owned: Sequence[Leaves]) -> Tensor:
    """The sum over all leaves on every rank (a collective): `mine` are this rank's, each leaf n as (n, n + 1)."""
    everything, parts = (0, owned[-1][1]), dict[Leaves, Tensor]()
    like = next(iter(mine.values()))
    for rank, run in enumerate(owned):
        for subtree in complete_subtrees(run, everything):
            parts[subtree] = add_up(subtree, mine).clone() if rank == dist.get_rank() else torch.empty_like(like)
            dist.broadcast(parts[subtree], src=rank)
    return add_up(everything, parts)


def _main() -> None:
    from demo import joined_world, say_once

    values = [1e8, 1.0, -1e8, 1.0, 0.5, 0.25]  # sums of them depend on the order
    with joined_world() as (rank, world_size):
        owned = [*pairwise(each * len(values) // world_size for each in range(world_size + 1))]
        mine = {(leaf, leaf + 1): torch.tensor([values[leaf]]) for leaf in range(*owned[rank])}
        total = sum_over_leaves(mine, owned)
        say_once(f"{world_size} ranks own the subtrees {[complete_subtrees(run, (0, len(values))) for run in owned]}")
        say_once(f"in the tree's order:    {total.item()!r}, whatever the number of ranks")
        say_once(f"from left to right:     {torch.tensor(values).cumsum(0)[-1].item()!r}")


if __name__ == "__main__":
    _main()
