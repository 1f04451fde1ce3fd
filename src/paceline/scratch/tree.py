"""How can 1, 2, 3 or 4 ranks add up the same numbers to the same *bits*?

Floating-point addition rounds, so the order matters: (a + b) + c differs from a + (b + c) in the last bits, and each
number of ranks has its own natural order. Here the order is fixed before anybody asks how many ranks there are. The
leaves of one binary tree are the V *virtual ranks*; a rank owns a run of neighbouring leaves. It adds up the complete
subtrees among them, and what is left of the tree above is added from the subtrees of all ranks.

    V = 6, leaves a..f:  ((a+b) + (c+d)) + (e+f)

    1 rank  owns a..f            sends nothing: the whole tree is its own
    2 ranks own  a..c and d..f   the first has a+b and c, the second d and e+f
    3 ranks own  ab, cd, ef      a+b, c+d, e+f
    any of them finishes with    ((a+b) + (c+d)) + (e+f): the same additions in the same order

Each rank finishes a share of every bucket: an all-to-all brings it the others' subtrees of its share, and an all-gather
brings everybody the sums. That moves as many bytes as an all-reduce, once per subtree that a rank owns.

Memory: a rank that owns L leaves adds as a binary counter counts, and keeps up to log2(L) + 1 partial sums; up to
2 log2(L) where its run does not begin with a large subtree.
Run me: `torchrun --nproc-per-node 3 -m paceline.scratch.tree`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.scratch.reduce import buckets_of, divide, named, pack, unpack

Node = tuple[int, int]
"""A complete subtree, by the leaves [first, stop) that it holds."""

T = TypeVar("T")
ALIGNED = 64  # elements: a share begins at a cache line, for every type


def middle(node: Node) -> int:
    """Where a node of two leaves or more is cut: at the largest power of two, as a binary counter carries.

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


def tree_sum(parts: dict[Node, T], add: Callable[[T, T], T], leaves: int) -> T:
    """The root, from subtrees that together hold every leaf once: `add` is called in the tree's order."""

    return _sum_of((0, leaves), parts, add)


def _sum_of(node: Node, parts: dict[Node, T], add: Callable[[T, T], T]) -> T:
    # no closure that calls itself: that is a cycle, which would hold all parts until the garbage collector comes
    if node in parts:
        return parts[node]
    cut = middle(node)
    return add(_sum_of((node[0], cut), parts, add), _sum_of((cut, node[1]), parts, add))


class PartialSums(Generic[T]):
    """Adds up leaves as they come, from left to right, and never keeps more sums than the tree needs.

    As a binary counter carries, two neighbours become one as soon as they are a subtree: 7 leaves that belong together
    are kept as sums of 4, 2 and 1. A leaf that is None, or never comes, is all zeros.
    """

    def __init__(self, owned: Node, leaves: int, add: Callable[[T | None, T | None], T | None]) -> None:
        """`add` adds two neighbours, and may change them; see `added`."""
        self.owned, self._leaves, self._added = owned, leaves, add
        self._next = owned[0]
        self._sums: list[tuple[Node, T | None]] = []

    def add(self, leaf: int, value: T | None) -> None:
        """Add `value`, which becomes ours, as `leaf`; leaves that were left out are zeros."""
        if not self._next <= leaf < self.owned[1]:
            raise ValueError(f"leaf {leaf} is not one of {self._next}..{self.owned[1] - 1}, those still to come")
        while self._next < leaf:
            self._push(self._next, None)
        self._push(leaf, value)

    def finish(self) -> list[T | None]:
        """The sums of our `subtrees`, in order."""
        while self._next < self.owned[1]:
            self._push(self._next, None)
        return [value for _, value in self._sums]

    def _push(self, leaf: int, value: T | None) -> None:
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


def added_each(left: list[Tensor | None] | None, right: list[Tensor | None] | None) -> list[Tensor | None] | None:
    """`added` for all tensors of two lists."""
    if left is None and right is None:
        return None
    nothing: list[Tensor | None] = [None] * len(left or right or [])
    return [added(a, b) for a, b in zip(left or nothing, right or nothing, strict=True)]


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

    def partial_sums(self, add: Callable[[T | None, T | None], T | None]) -> PartialSums[T]:
        """An empty counter for this rank's leaves."""
        return PartialSums(self.owned[self.rank], self.leaves, add)

    def padded(self, size: int) -> int:
        """`size` elements, made up to equal shares for all ranks that begin at cache lines."""
        unit = ALIGNED * len(self.owned)
        return -(-size // unit) * unit


class AllToAll:
    """The first half of a sum over all leaves: every rank gets all subtrees of its share, and adds them up."""

    def __init__(
        self, forest: Forest, own: Sequence[Tensor], group: dist.ProcessGroup | None = None, name: str = ""
    ) -> None:
        """Begin it, with the sums of our own subtrees, each (n,), n equal shares for all ranks."""
        self._nodes, self._own = forest.nodes(), own[0]
        world_size, counts = len(self._nodes), [len(nodes) for nodes in self._nodes]
        self._share = len(own[0]) // world_size
        self._work: dist.Work | None = None
        if world_size > 1:  # `_own` is kept: gloo reads it until the work is done
            self._own = own[0] if len(own) == 1 else torch.stack([o.view(world_size, -1) for o in own], 1).flatten()
            self._received = own[0].new_empty(sum(counts) * self._share)
            self._work = dist.all_to_all_single(
                self._received, named(self._own, name),
                [count * self._share for count in counts], [counts[forest.rank] * self._share] * world_size,
                group=group, async_op=True,
            )  # fmt: skip

    def sum(self) -> Tensor:
        """(n / N,): wait, and add up our share of the sum; it lies in what was received, which lives as long."""
        if self._work is None:
            return self._own
        self._work.wait()
        order = [node for nodes in self._nodes for node in nodes]
        parts = dict(zip(order, self._received.view(-1, self._share).unbind(), strict=True))
        return tree_sum(parts, Tensor.add_, self._nodes[-1][-1][1])

    def end(self) -> Tensor:
        """The same in memory of its own, so that the subtrees of all ranks may go."""
        return self.sum() if self._work is None else self.sum().clone()


class Exchange:
    """One sum over all leaves, on its way: made on every rank with its own subtrees' sums, each (n,), n padded.

    `begin` of the next exchange may come before `end` of this one, in the same order on every rank.
    """

    def __init__(
        self, forest: Forest, own: Sequence[Tensor], group: dist.ProcessGroup | None = None, name: str = ""
    ) -> None:
        self._group, self._name, self._flat = group, name, own[0]
        self._work: dist.Work | None = None
        self._scatter: AllToAll | None = None
        counts = [len(nodes) for nodes in forest.nodes()]
        if counts == [1, 1]:  # a sum of two has only one order: then the usual all-reduce is the tree
            self._work = dist.all_reduce(named(self._flat, name), group=group, async_op=True)
        elif len(counts) > 1:
            self._scatter = AllToAll(forest, own, group, name)

    def gather(self) -> None:
        """Wait for the subtrees of our share, add them up, and start to bring the sums of all shares together."""
        if self._scatter is not None:
            self._mine = self._scatter.sum()  # kept: the backend reads it until the work is done
            self._work = gather_shares(self._flat, named(self._mine, self._name), self._group)

    def end(self) -> Tensor:
        """(n,): the sum, on every rank."""
        if self._work is not None:
            self._work.wait()
        return self._flat


def gather_shares(flat: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to bring all ranks' equal shares together in `flat`, uncopied; `mine` may be this rank's part of it."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13
    work = getattr(dist, name)(flat, mine, group=group, async_op=True)
    assert isinstance(work, dist.Work)  # None only for ranks outside the group
    return work


class LeafBuckets:
    """The gradients of virtual ranks, in buckets that leave in order, as they fill in this rank's last backward.

    autograd would add the virtual ranks up from left to right, so each one's gradients are taken away before the next.
    Several backwards of one virtual rank add up as ever: they are always on one rank.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        forest: Forest,
        send: Callable[[int, list[list[Tensor | None] | None]], None],
    ) -> None:
        """Hook into the parameters. `send` is given each bucket's number and our subtrees' sums of it, in order."""
        self._buckets, self._forest, self._send = buckets, forest, send
        self._bucket_of = {p: index for index, bucket in enumerate(buckets) for p in bucket}
        self.forget()
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._bucket_of]

    @property
    def untouched(self) -> bool:
        """Whether nothing of a step is here yet."""
        return self._leaf is None and self._sent == 0

    @contextmanager
    def leaf(self, virtual_rank: int, *, is_last: bool, counted: bool = True) -> Generator[None]:
        """Around one backward of a virtual rank.

        Args:
            virtual_rank: ours, and not before the one of the last backward.
            is_last: whether this is our last backward of the step: then buckets leave as they fill.
            counted: False for a stand-in, whose gradients are thrown away.
        """
        if self._leaf not in (None, virtual_rank):
            self._take_away()
        self._leaf, self._leaving = virtual_rank, is_last and counted
        yield
        self._leaving = False
        if not counted:
            for parameter in self._bucket_of:
                parameter.grad = None
            self._leaf = None

    def send_rest(self) -> None:
        """Let all buckets leave that have not: every rank sends every bucket, also one without a gradient."""
        while self._sent < len(self._buckets):
            self._send_next()

    def forget(self) -> None:
        """Begin anew, with the next step."""
        self._leaf: int | None = None
        self._leaving = False
        self._sent = 0
        self._missing = [set(bucket) for bucket in self._buckets]
        self._sums = [self._forest.partial_sums(added_each) for _ in self._buckets]

    def remove(self) -> None:
        """Take the hooks off the parameters: backward is again what it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_gradient(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        bucket = self._bucket_of[parameter]
        if not self._leaving and bucket >= self._sent:
            return
        if parameter not in self._missing[bucket]:
            raise RuntimeError("a second backward in the step's last micro-batch: its gradients would be lost")
        self._missing[bucket].remove(parameter)
        while self._sent < len(self._buckets) and not self._missing[self._sent]:
            self._send_next()

    @torch.no_grad()
    def _take_away(self) -> None:
        """The gradients of the virtual rank that has ended become a leaf of each bucket that is still here."""
        for index in range(self._sent, len(self._buckets)):
            self._add_leaf(index)

    def _add_leaf(self, index: int) -> None:
        parameters = self._buckets[index]
        if self._leaf is not None and any(p.grad is not None for p in parameters):
            self._sums[index].add(self._leaf, [p.grad for p in parameters])  # not copied: they become the sum's own
            for parameter in parameters:
                parameter.grad = None

    @torch.no_grad()
    def _send_next(self) -> None:
        index = self._sent
        self._sent += 1
        self._add_leaf(index)
        sums = self._sums[index].finish()
        self._sums[index] = self._forest.partial_sums(added_each)  # whoever sends them copies them: let them go
        self._send(index, sums)


class TreeReducer:
    """Sums gradients over virtual ranks in the tree's order, while backward still runs.

        reducer = TreeReducer(model, Forest([(0, 2), (2, 3)], rank))
        for virtual_rank in my_virtual_ranks:
            with reducer.leaf(virtual_rank, is_last=virtual_rank == my_virtual_ranks[-1]):
                loss(...).backward()
        reducer.finish(divisor)                  # .grad is the sum over all virtual ranks, divided

    None is treated as by `reduce.all_reduce_gradients`. Every step ends with `finish`, or after an error with `reset`,
    on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        forest: Forest,
        *,
        bucket_bytes: int = 25 << 20,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._forest, self._group = forest, group
        self._buckets = buckets_of([p for p in module.parameters() if p.requires_grad], bucket_bytes)
        self._exchanges: list[Exchange] = []
        self._leaves = LeafBuckets(self._buckets, forest, self._start)
        self.leaf, self.remove = self._leaves.leaf, self._leaves.remove

    @torch.no_grad()
    def finish(self, divisor: float | Tensor) -> None:
        """Return when every .grad holds the sum over all virtual ranks, divided by `divisor`."""
        try:
            self._leaves.send_rest()
            for exchange in self._exchanges:
                exchange.gather()
            for bucket, exchange in zip(self._buckets, self._exchanges, strict=True):
                unpack(divide(exchange.end()[: _packed_size(bucket)], divisor), bucket)
        finally:
            self._forget()

    def reset(self) -> None:
        """Make the reducer usable again after an exception, as `GradientReducer.reset` does."""
        try:
            self._leaves.send_rest()
            for exchange in self._exchanges:
                exchange.gather()
            for exchange in self._exchanges:
                exchange.end()
        finally:
            self._forget()

    def _forget(self) -> None:
        self._leaves.forget()
        self._exchanges = []

    def _start(self, index: int, sums: list[list[Tensor | None] | None]) -> None:
        size = self._forest.padded(_packed_size(self._buckets[index]))
        own = [pack(self._buckets[index], each, size) for each in sums]
        self._exchanges.append(Exchange(self._forest, own, self._group, f"bucket {index}"))


def _packed_size(parameters: Sequence[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters) + len(parameters)


def _main() -> None:
    from paceline.scratch._demo import joined_world, say

    values = [1e8, 1.0, -1e8, 1.0, 0.5, 0.25]  # sums of them depend on the order
    with joined_world() as (rank, world_size):
        cuts = [r * len(values) // world_size for r in range(world_size + 1)]
        forest = Forest([*pairwise(cuts)], rank)
        sums = forest.partial_sums(added)
        for leaf in range(*forest.owned[rank]):
            sums.add(leaf, torch.full((forest.padded(1),), values[leaf]))
        zeros = torch.zeros(forest.padded(1))
        exchange = Exchange(forest, [zeros.clone() if own is None else own for own in sums.finish()])
        exchange.gather()
        say(f"{world_size} ranks own the subtrees {forest.nodes()}")
        say(f"in the tree's order:    {exchange.end()[0].item()!r}, whatever the number of ranks")
        say(f"from left to right:     {torch.tensor(values).cumsum(0)[-1].item()!r}")


if __name__ == "__main__":
    _main()
