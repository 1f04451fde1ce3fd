"""How does each rank get the sum of *its share* of the gradients, without anybody ever holding all sums?

As in `tree`, gradients are added up over virtual ranks in the order of one fixed tree, in buckets, while backward
still runs. But the sums of a share stay with the rank that updates it (`zero`): a reduce-scatter, half of what an
all-reduce sends. What a bucket's gradients took is free as soon as the bucket has arrived, so with one micro-batch for
each rank no more than a few buckets of whole gradients exist at any time.

    bucket, 2 ranks     rank 0 sends its gradients of share 1, and receives rank 1's of share 0
                        rank 0 keeps the sum of share 0, rank 1 of share 1

With several micro-batches for each rank the gradients are added up before they leave, and so exist as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.scratch.reduce import divide
from paceline.scratch.tree import AllToAll, Forest, LeafBuckets
from paceline.scratch.zero import ALIGNED, Bucket, Shards, round_up

MOST_ON_THEIR_WAY = 2  # buckets: one travels while the next one fills


class Scattering(Protocol):
    """A sum over all leaves, on its way to those who keep a share of it each."""

    def end(self) -> Tensor:
        """(n / N,): this rank's share of the sum; new memory, or that of the given sums."""
        ...


Scatter = Callable[[Forest, Sequence[Tensor], "dist.ProcessGroup | None", str], Scattering]
"""(forest, own subtrees' sums (n,) each, group, name): begins it. Any number may be begun before the first one ends."""


class ScatterReducer:
    """Gives each piece of `Shards` its gradient; used as `tree.TreeReducer`, whose rules hold here too.

        shards = Shards(model, rank, world_size)
        reducer = ScatterReducer(shards, Forest([(0, 2), (2, 3)], rank))
        for virtual_rank in my_virtual_ranks:
            with reducer.leaf(virtual_rank, is_last=virtual_rank == my_virtual_ranks[-1]):
                loss(...).backward()
        reducer.finish(divisor)                  # the pieces' .grad is the sum over all virtual ranks, divided

    The module's own parameters have no gradient then. A piece's is None where no virtual rank has used its parameter.
    """

    def __init__(
        self,
        shards: Shards,
        forest: Forest,
        *,
        group: dist.ProcessGroup | None = None,
        scatter: Scatter = AllToAll,
    ) -> None:
        self._shards, self._forest, self._group, self._scatter = shards, forest, group, scatter
        self._on_their_way: deque[Scattering] = deque()
        self._arrived: list[Tensor] = []
        self._leaves = LeafBuckets([bucket.parameters for bucket in shards.buckets], forest, self._start)
        self.remove = self._leaves.remove

    def leaf(self, virtual_rank: int, *, is_last: bool, counted: bool = True) -> AbstractContextManager[None]:
        """Around one backward of a virtual rank; see `tree.LeafBuckets.leaf`."""
        if self._leaves.untouched:
            for piece in self._shards.pieces.values():  # of the last step: its memory is needed now
                piece.parameter.grad = None
        return self._leaves.leaf(virtual_rank, is_last=is_last, counted=counted)

    @torch.no_grad()
    def finish(self, divisor: float | Tensor) -> None:
        """Return when every piece's .grad holds the sum over all virtual ranks, divided by `divisor`."""
        try:
            self._end_all()
            for bucket, share in zip(self._shards.buckets, self._arrived, strict=True):
                self._hand_out(bucket, share, divisor)
        finally:
            self._forget()

    def reset(self) -> None:
        """Make the reducer usable again after an exception, as `GradientReducer.reset` does."""
        try:
            self._end_all()
        finally:
            self._forget()

    def _forget(self) -> None:
        self._leaves.forget()
        self._on_their_way.clear()
        self._arrived = []

    def _start(self, index: int, sums: list[list[Tensor | None] | None]) -> None:
        bucket, world_size = self._shards.buckets[index], self._shards.world_size
        own = [_packed(bucket, each, world_size) for each in sums]
        sums.clear()  # the gradients are copied: let them go before those of others come
        self._on_their_way.append(self._scatter(self._forest, own, self._group, f"bucket {index}"))
        while len(self._on_their_way) > MOST_ON_THEIR_WAY:
            self._end_first()

    def _end_first(self) -> None:
        self._arrived.append(self._on_their_way.popleft().end())

    def _end_all(self) -> None:
        self._leaves.send_rest()
        while self._on_their_way:
            self._end_first()

    def _hand_out(self, bucket: Bucket, share: Tensor, divisor: float | Tensor) -> None:
        sums = divide(share[: bucket.share], divisor)
        used: list[float] = share[bucket.share :].tolist()
        for run in bucket.runs[self._shards.rank]:
            if used[run.index]:
                piece = self._shards.pieces[bucket.parameters[run.index]]
                piece.parameter.grad = sums[run.at : run.at + run.stop - run.start]


def _packed(bucket: Bucket, grads: Sequence[Tensor | None] | None, world_size: int) -> Tensor:
    """Each rank's share of the gradients, then one number for each parameter: 1 where there is a gradient.

    (n * (share + flags),): every rank needs to know of its own pieces which ones nobody has used, and a message of
    their own would cost a round trip.
    """
    parameters = bucket.parameters
    flat = [None] * len(parameters) if grads is None else [None if g is None else g.reshape(-1) for g in grads]
    packed = parameters[0].new_zeros(world_size, bucket.share + round_up(len(parameters), ALIGNED))
    for row, runs in zip(packed, bucket.runs, strict=True):
        for run in runs:
            if (gradient := flat[run.index]) is not None:
                row[run.at : run.at + run.stop - run.start] = gradient[run.start : run.stop]
    for index, gradient in enumerate(flat):
        if gradient is not None:
            packed[:, bucket.share + index] = 1
    return packed.flatten()
