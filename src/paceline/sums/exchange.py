"""Sums over the leaves of a tree by torch.distributed: on their way while something else is computed.

Each rank finishes a share of every sum: an all-to-all brings it the others' subtrees of its share, and an all-gather
brings everybody the sums. That moves as many bytes as an all-reduce, once per subtree that a rank owns.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.sums.gather import gather_shares, labelled
from paceline.sums.tree import Forest, tree_sum


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
                self._received, labelled(self._own, name),
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

    The next exchange may begin before this one ends, in the same order on every rank.
    """

    def __init__(
        self,
        forest: Forest,
        own: Sequence[Tensor],
        group: dist.ProcessGroup | None = None,
        name: str = "",
        *,
        in_order: bool = True,
    ) -> None:
        """`in_order`: of the tree; else, if each rank has one subtree, in the backend's order, and n is any number."""
        self._group, self._name, self._flat = group, name, own[0]
        self._work: dist.Work | None = None
        self._scatter: AllToAll | None = None
        counts = [len(nodes) for nodes in forest.nodes()]
        if counts == [1, 1] or not in_order:  # a sum of two has one order only: then the usual all-reduce is the tree
            self._work = dist.all_reduce(labelled(self._flat, name), group=group, async_op=True)
        elif len(counts) > 1:
            self._scatter = AllToAll(forest, own, group, name)

    def gather(self) -> None:
        """Wait for the subtrees of our share, add them up, and start to bring the sums of all shares together."""
        if self._scatter is not None:
            self._mine = self._scatter.sum()  # kept: the backend reads it until the work is done
            self._work = gather_shares(self._flat, labelled(self._mine, self._name), self._group)

    def end(self) -> Tensor:
        """(n,): the sum, on every rank."""
        if self._work is not None:
            self._work.wait()
        return self._flat
