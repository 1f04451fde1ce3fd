"""One order of additions for any number of ranks: the sum has the same *bits*.

Floating-point addition rounds: (a + b) + c differs from a + (b + c) in the last bits. Here the order does not depend on
the number of ranks. The V *virtual ranks* are the leaves of one binary tree. A rank owns a range of consecutive leaves,
and adds up the complete subtrees in it. The upper part of the tree is computed from the subtrees of all ranks.

    V = 6, leaves a..f:  ((a+b) + (c+d)) + (e+f)

    1 rank  owns a..f            has the whole tree, and sends nothing
    2 ranks own  a..c and d..f   the first has a+b and c, the second d and e+f
    3 ranks own  ab, cd, ef      a+b, c+d, e+f
    in all three cases the end   ((a+b) + (c+d)) + (e+f): the same additions in the same order

A rank that owns L leaves adds them like a binary counter. It keeps up to log2(L) + 1 partial sums, or up to 2 log2(L)
if its range does not begin with a large subtree. examples/textbook/tree.py is a runnable short version.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

TreeNode = tuple[int, int]
"""A complete subtree: the leaves [first, stop)."""

Grads = list[Tensor | None]
"""The gradient of each parameter of a bucket. None: the parameter was not used, all zeros."""

_T = TypeVar("_T")
ALIGNMENT_ELEMENTS = 64  # elements: shards and segments of every type begin at a cache line


def find_split_leaf(node: tuple[int, int]) -> int:
    """The leaf at which a node of two or more leaves is split: after the largest power of two, like a binary counter.

    find_split_leaf((0, 6)) == 4, find_split_leaf((0, 4)) == 2, find_split_leaf((4, 6)) == 5
    """
    first, stop = node
    return first + (1 << ((stop - first - 1).bit_length() - 1))


def is_tree_node(node: TreeNode, leaves: int) -> bool:
    at = (0, leaves)
    while at != node and at[1] - at[0] > 1:
        cut = find_split_leaf(at)
        at = (at[0], cut) if node[1] <= cut else (cut, at[1])
    return at == node


def split_into_subtrees(owned: TreeNode, leaves: int) -> list[TreeNode]:
    """The largest complete subtrees within a range of leaves, from left to right.

    subtrees((0, 3), 6) == [(0, 2), (2, 3)], subtrees((3, 6), 6) == [(3, 4), (4, 6)]
    """

    def within(node: TreeNode) -> list[TreeNode]:
        if owned[0] <= node[0] and node[1] <= owned[1]:
            return [node]
        if node[1] <= owned[0] or owned[1] <= node[0]:
            return []
        cut = find_split_leaf(node)
        return within((node[0], cut)) + within((cut, node[1]))

    return within((0, leaves))


def tree_sum(parts: dict[TreeNode, _T], add: Callable[[_T, _T], _T], stop: int, first: int = 0) -> _T:
    """The sum of the leaves [first, stop), from subtrees that contain each once. Calls `add` in the tree's order."""
    if (first, stop) in parts:
        return parts[first, stop]
    cut = find_split_leaf((first, stop))
    return add(tree_sum(parts, add, cut, first), tree_sum(parts, add, stop, cut))


class PartialSums(Generic[_T]):
    """Adds up leaves from left to right, and keeps only the sums that the tree needs.

    Two neighbours become one sum when they are a subtree, like a carry in a binary counter: of 7 leaves it keeps the
    sums of 4, 2 and 1. A leaf that is None or missing is all zeros.
    """

    def __init__(self, owned: TreeNode, leaves: int, add: Callable[[_T | None, _T | None], _T | None]) -> None:
        self.owned, self._leaves, self._add = owned, leaves, add
        self.clear()

    def clear(self) -> None:
        self._next = self.owned[0]
        self._nodes: list[TreeNode] = []
        self._sums: list[_T | None] = []

    def add(self, leaf: int, value: _T | None) -> None:
        """Add `value` as `leaf`. Its memory then belongs to this object. Skipped leaves are zeros."""
        if not self._next <= leaf < self.owned[1]:
            raise ValueError(f"leaf {leaf} is not one of {self._next}..{self.owned[1] - 1}")
        while self._next < leaf:
            self._push(self._next, None)
        self._push(leaf, value)

    def finish(self) -> list[_T | None]:
        """The sums of this rank's `subtrees`, in order, which now belong to the caller. The next leaf is the first."""
        while self._next < self.owned[1]:
            self._push(self._next, None)
        sums = self._sums
        self.clear()
        return sums

    def _push(self, leaf: int, value: _T | None) -> None:
        self._next = leaf + 1
        node = (leaf, leaf + 1)
        while self._nodes and is_tree_node((self._nodes[-1][0], node[1]), self._leaves):
            node, value = (self._nodes.pop()[0], node[1]), self._add(self._sums.pop(), value)
        self._nodes.append(node)
        self._sums.append(value)


def add_optional(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """left + right in place; None means zeros.

    x + 0 is x, except that -0 + 0 is +0. None is treated like real zeros, because a different number of ranks would add
    real zeros.
    """
    if left is None:
        return None if right is None else right.add_(0.0)
    return left.add_(0.0) if right is None else left.add_(right)


def add_gradient_lists(left: Grads | None, right: Grads | None) -> Grads | None:
    if left is None and right is None:
        return None
    nothing: Grads = [None] * len(left or right or [])
    pairs = [*zip(left or nothing, right or nothing, strict=True)]
    if present_pairs := [(a, b) for a, b in pairs if a is not None and b is not None]:
        torch._foreach_add_(*map(list, zip(*present_pairs, strict=True)))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return [a if a is not None and b is not None else add_optional(a, b) for a, b in pairs]


@dataclass(frozen=True)
class LeafPartition:
    """The leaves of each rank: consecutive `ranges`, by rank, from 0 to `leaves`. `rank` is this rank."""

    ranges: Sequence[TreeNode]
    rank: int

    @classmethod
    def one_leaf_per_rank(cls, size: int, rank: int) -> Self:
        return cls([(leaf, leaf + 1) for leaf in range(size)], rank)

    @cached_property
    def leaf_count(self) -> int:
        return self.ranges[-1][1]

    @cached_property
    def subtrees_by_rank(self) -> list[list[TreeNode]]:
        return [split_into_subtrees(owned, self.leaf_count) for owned in self.ranges]

    def make_partial_sums(self, add: Callable[[_T | None, _T | None], _T | None]) -> PartialSums[_T]:
        return PartialSums(self.ranges[self.rank], self.leaf_count, add)

    def padded(self, size: int) -> int:
        """`size` rounded up to shards of equal size that begin at cache lines."""
        return round_up(size, ALIGNMENT_ELEMENTS * len(self.ranges))


def round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
