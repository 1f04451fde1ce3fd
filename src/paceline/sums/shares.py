"""The transport of gradients that are cut: each rank gets the sum of its share, and nobody ever holds all sums.

A reduce-scatter, half of what an all-reduce sends. What a bucket's gradients took is free as soon as the bucket has
arrived, so with one micro-batch for each rank no more than a few buckets of whole gradients exist at any time. With
several micro-batches for each rank the gradients are added up before they leave, and so exist as a whole.

    bucket, 2 ranks     rank 0 sends its gradients of share 1, and receives rank 1's of share 0
                        rank 0 keeps the sum of share 0, rank 1 of share 1
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.sums.buckets import divide
from paceline.sums.ranks import ranks
from paceline.sums.shards import CutBucket, Shards
from paceline.sums.transports import Bucket
from paceline.sums.tree import ALIGNED, Forest, Grads, round_up

MOST_UNDER_WAY = 2  # buckets: one travels while the next one fills


class Shares:
    """Gives each piece of `shards` its gradient, where any rank has used its parameter; the parameters get none."""

    early = True

    def __init__(self, shards: Shards, forest: Forest) -> None:
        self.buckets: Sequence[Bucket] = [bucket.parameters for bucket in shards.buckets]
        self._shards, self._forest = shards, forest
        self.forget()

    def begin(self, number: int, own: list[Grads | None]) -> None:
        """See transports.Transport."""
        bucket = self._shards.buckets[number]
        packed = [_packed(bucket, grads, self._shards.world_size) for grads in own]
        self._used.append([any(grads and grads[i] is not None for grads in own) for i in range(len(bucket.parameters))])
        own.clear()  # the gradients are copied: let them go before those of others come
        self._under_way.append(ranks().start_share_of_sum(self._forest, packed, f"bucket {number}"))
        while len(self._under_way) > MOST_UNDER_WAY:
            self._end_first()

    def end(self, divisor: float | Tensor | None) -> bool:
        """See transports.Transport."""
        while self._under_way:
            self._end_first()
        if divisor is not None:
            shares = [*zip(self._shards.buckets, self._arrived, self._used, strict=True)]
            # Looked at only if this rank did not use all of them itself: on a GPU, looking means waiting.
            flags = [share[bucket.share :] for bucket, share, used in shares if not all(used)]
            told: list[float] = torch.cat(flags).tolist() if flags else []
            for bucket, share, used in shares:
                size = 0 if all(used) else len(share) - bucket.share
                self._hand_out(bucket, divide(share[: bucket.share], divisor), told[:size] or used)
                del told[:size]
        return False

    def forget(self) -> None:
        """See transports.Transport."""
        self._under_way = deque[Callable[[], Tensor]]()
        self._arrived: list[Tensor] = []
        self._used: list[Sequence[float]] = []

    def _end_first(self) -> None:
        self._arrived.append(self._under_way.popleft()())

    def _hand_out(self, bucket: CutBucket, sums: Tensor, used: Sequence[float]) -> None:
        for run in bucket.runs[self._shards.rank]:
            if used[run.index]:
                piece = self._shards.pieces[bucket.parameters[run.index]]
                piece.parameter.grad = sums[run.at : run.at + run.stop - run.start]


def _packed(bucket: CutBucket, grads: Grads | None, world_size: int) -> Tensor:
    """Each rank's share of the gradients, then one number for each parameter: 1 where there is a gradient.

    (n * (share + flags),): every rank needs to know of its own pieces which ones nobody has used, and a message of
    their own would cost a round trip.
    """
    parameters = bucket.parameters
    flat = [None] * len(parameters) if grads is None else [None if g is None else g.reshape(-1) for g in grads]
    packed = parameters[0].new_zeros(world_size, bucket.share + round_up(len(parameters), ALIGNED))
    places, pieces = list[Tensor](), list[Tensor]()
    for row, runs in zip(packed, bucket.runs, strict=True):
        for run in runs:
            if (gradient := flat[run.index]) is not None:
                places.append(row[run.at : run.at + run.stop - run.start])
                pieces.append(gradient[run.start : run.stop])
    if places:
        torch._foreach_copy_(places, pieces)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    packed[:, bucket.share : bucket.share + len(flat)] = 1
    for index, gradient in enumerate(flat):
        if gradient is None:
            packed[:, bucket.share + index] = 0
    return packed.flatten()
