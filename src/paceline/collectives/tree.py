"""One order of additions for any number of ranks, so that all of them come to the same *bits*.

Floating-point addition rounds, so the order matters: (a + b) + c differs from a + (b + c) in the last bits, and each
number of ranks has its own natural order. Here the order is fixed before anybody asks how many ranks there are. The
leaves of one binary tree are the V *virtual ranks*; a rank owns a run of neighbouring leaves. It adds up the complete
subtrees among them, and what is left of the tree above is added from the subtrees of all ranks.

    V = 6, leaves a..f:  ((a+b) + (c+d)) + (e+f)

    1 rank  owns a..f            sends nothing: the whole tree is its own
    2 ranks own  a..c and d..f   the first has a+b and c, the second d and e+f
    3 ranks own  ab, cd, ef      a+b, c+d, e+f
    any of them finishes with    ((a+b) + (c+d)) + (e+f): the same additions in the same order

Memory: a rank that owns L leaves adds as a binary counter counts, and keeps up to log2(L) + 1 partial sums; up to
2 log2(L) where its run does not begin with a large subtree. examples/textbook/tree.py is the same on
two pages, to be run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

Node = tuple[int, int]
"""A complete subtree, by the leaves [first, stop) that it holds."""

Grads = list[Tensor | None]
"""Of each parameter of a bucket; None where it is not used: all zeros."""

_T = TypeVar("_T")
ALIGNED = 64  # elements: shares and pieces begin at a cache line, for every type, and so where a vector does


def middle(node: tuple[int, int]) -> int:
    """Where a node of two or more leaves is split: at the largest power of two, as a binary counter carries.

    middle((0, 6)) == 4, middle((0, 4)) == 2, middle((4, 6)) == 5
    """
    first, stop = node
    return first + (1 << ((stop - first - 1).bit_length() - 1))


def is_node(node: Node, leaves: int) -> bool:
    """Whether the leaves of `node` make a subtree of the tree over `leaves` leaves."""
    at = (0, leaves)
    while at != node and at[1] - at[0] > 1:
        cut = middle(at)
        at = (at[0], cut) if node[1] <= cut else (cut, at[1])
    return at == node


def subtrees(owned: Node, leaves: int) -> list[Node]:
    """The largest complete subtrees within a run of leaves, from left to right.

    subtrees((0, 3), 6) == [(0, 2), (2, 3)], subtrees((3, 6), 6) == [(3, 4), (4, 6)]
    """

    def within(node: Node) -> list[Node]:
        if owned[0] <= node[0] and node[1] <= owned[1]:
            return [node]
        if node[1] <= owned[0] or owned[1] <= node[0]:
            return []
        cut = middle(node)
        return within((node[0], cut)) + within((cut, node[1]))

    return within((0, leaves))


def tree_sum(parts: dict[Node, _T], add: Callable[[_T, _T], _T], leaves: int) -> _T:
    """The root, from subtrees that together hold every leaf once: `add` is called in the tree's order."""

    return _sum_of((0, leaves), parts, add)


def _sum_of(node: Node, parts: dict[Node, _T], add: Callable[[_T, _T], _T]) -> _T:
    # no closure that calls itself: that is a cycle, which would hold all parts until the garbage collector comes
    if node in parts:
        return parts[node]
    cut = middle(node)
    return add(_sum_of((node[0], cut), parts, add), _sum_of((cut, node[1]), parts, add))


class PartialSums(Generic[_T]):
    """Adds up leaves as they come, from left to right, and never keeps more sums than the tree needs.

    As a binary counter carries, two neighbours become one as soon as they are a subtree: 7 leaves that belong together
    are kept as sums of 4, 2 and 1. A leaf that is None, or never comes, is all zeros.
    """

    def __init__(self, owned: Node, leaves: int, add: Callable[[_T | None, _T | None], _T | None]) -> None:
        """`add` adds two neighbours, and may change them; see `added`."""
        self.owned, self._leaves, self._added = owned, leaves, add
        self._next = owned[0]
        self._sums: list[tuple[Node, _T | None]] = []

    def add(self, leaf: int, value: _T | None) -> None:
        """Add `value`, which becomes ours, as `leaf`; leaves that were left out are zeros."""
        if not self._next <= leaf < self.owned[1]:
            raise ValueError(f"leaf {leaf} is not one of {self._next}..{self.owned[1] - 1}, those still to come")
        while self._next < leaf:
            self._push(self._next, None)
        self._push(leaf, value)

    def finish(self) -> list[_T | None]:
        """The sums of our `subtrees`, in order."""
        while self._next < self.owned[1]:
            self._push(self._next, None)
        return [value for _, value in self._sums]

    def _push(self, leaf: int, value: _T | None) -> None:
        self._next = leaf + 1
        node = (leaf, leaf + 1)
        while self._sums and is_node((self._sums[-1][0][0], node[1]), self._leaves):
            left, left_value = self._sums.pop()
            node, value = (left[0], node[1]), self._added(left_value, value)
        self._sums.append((node, value))


def added(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """left + right in place, None for zeros.

    x + 0 is x, except that it turns -0 into +0: that is done for None too, because another number of ranks would add
    real zeros.
    """
    if left is None:
        return None if right is None else right.add_(0.0)
    return left.add_(0.0) if right is None else left.add_(right)


def added_each(left: Grads | None, right: Grads | None) -> Grads | None:
    """`added` for all tensors of two lists."""
    if left is None and right is None:
        return None
    nothing: Grads = [None] * len(left or right or [])
    pairs = [*zip(left or nothing, right or nothing, strict=True)]
    if both := [(a, b) for a, b in pairs if a is not None and b is not None]:
        torch._foreach_add_(*map(list, zip(*both, strict=True)))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return [a if a is not None and b is not None else added(a, b) for a, b in pairs]


@dataclass(frozen=True)
class Forest:
    """Who owns which leaves: `owned[rank]`, runs that tile 0..leaves."""

    owned: Sequence[Node]
    rank: int

    @property
    def leaves(self) -> int:
        """V."""
        return self.owned[-1][1]

    def nodes(self) -> list[list[Node]]:
        """The subtrees of each rank."""
        return [subtrees(owned, self.leaves) for owned in self.owned]

    def partial_sums(self, add: Callable[[_T | None, _T | None], _T | None]) -> PartialSums[_T]:
        """An empty counter for this rank's leaves."""
        return PartialSums(self.owned[self.rank], self.leaves, add)

    def padded(self, size: int) -> int:
        """`size` elements, made up to equal shares for all ranks that begin at cache lines."""
        return round_up(size, ALIGNED * len(self.owned))


def round_up(number: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-number // unit) * unit
