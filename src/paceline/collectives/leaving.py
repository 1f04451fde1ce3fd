"""How do gradients leave for other hosts while backward still computes those of earlier layers?

In buckets, which leave in one order on all ranks as they fill in each rank's last backward: see `scratch.tree`'s
LeafBuckets. No core is idle meanwhile, but the wire would be. To add up a bucket in memory the ranks of a host wait for
each other, as they would at the end of backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.collectives.across import BUNDLE_BYTES, HostsSum, Nesting
from paceline.collectives.hosts import Hosts
from paceline.collectives.lanes import Flat, Scratch
from paceline.collectives.layout import agreed_strides, flat, give, kinds, laid_out, trained
from paceline.collectives.tree import in_words
from paceline.scratch.reduce import buckets_of
from paceline.scratch.tree import Forest, LeafBuckets

MOST_BYTES = 25 << 20  # of a bucket


class LeavingGradients:
    """Sums gradients over the ranks of several hosts while backward runs; used as `scratch.tree.TreeReducer`.

    Where each rank is one leaf, all its backwards of a step are of that leaf.
    """

    def __init__(
        self, module: nn.Module, hosts: Hosts, forest: Forest, nesting: Nesting, *, bucket_bytes: int | None = None
    ) -> None:
        """A collective. `forest`: which leaves each rank of the world has; `nesting`: in what order they are added.

        By default each rank's share of a bucket is what travels at once.
        """
        if bucket_bytes is None:
            bucket_bytes = min(MOST_BYTES, BUNDLE_BYTES * hosts.memory.size)
        parameters, scratch, self._memory = trained(module), Scratch(), hosts.memory
        self._strides = dict(zip(parameters, agreed_strides(parameters, hosts.size), strict=True))
        self._buckets = buckets_of(parameters, bucket_bytes)
        self._sums = [
            HostsSum(hosts, *kinds(bucket), nesting, f"bucket {number}", scratch)
            for number, bucket in enumerate(self._buckets)
        ]
        # one for all buckets: the hang guard looks at the last 64 calls, and must find the exchanges among them
        self._handing_out = self._memory.called("all_gather", "gradients", *in_words(*kinds(parameters)))
        self._leaves = LeafBuckets(self._buckets, forest, self._begin)
        self.leaf, self.remove = self._leaves.leaf, self._leaves.remove
        self._forget()

    @torch.no_grad()
    def finish(self, divisor: float | Tensor) -> None:
        """Return when every .grad holds the sum over all leaves, divided by `divisor` (a collective)."""
        try:
            for bucket, first, results in zip(self._buckets, self._first, self._ended(divisor), strict=True):
                for parameter, grad, result in zip(bucket, first, results, strict=True):
                    give(parameter, self._strides[parameter], grad, result)
        finally:
            self._forget()

    def reset(self) -> None:
        """Make the reducer usable again after an exception, as `GradientReducer.reset` does."""
        try:
            self._ended(None)
        finally:
            self._forget()

    def _ended(self, divisor: float | Tensor | None) -> list[list[Tensor | None]]:
        """The sums of each bucket, of which every rank sends every one."""
        self._leaves.send_rest()
        with self._memory.operation(self._memory.bulk, self._handing_out):
            return [total.end(divisor) for total in self._sums]

    def _forget(self) -> None:
        self._leaves.forget()
        self._first: list[Sequence[Tensor | None]] = []
        for total in self._sums:
            total.forget()

    def _begin(self, number: int, sums: list[list[Tensor | None] | None]) -> None:
        bucket = self._buckets[number]
        own = [None if grads is None else self._laid_out(bucket, grads) for grads in sums]
        self._first.append(own[0] or [None] * len(bucket))
        try:
            before = self._sums[number - 1] if number > 0 else None
            self._sums[number].begin([_flat(grads) for grads in own], after=before)
        except BaseException:
            self._forget()  # we are in a backward, after which nobody calls `finish`
            raise

    def _laid_out(self, bucket: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [laid_out(grad, p, self._strides[p]) for grad, p in zip(grads, bucket, strict=True)]


def _flat(grads: Sequence[Tensor | None] | None) -> Flat | None:
    return None if grads is None else [flat(grad) for grad in grads]
