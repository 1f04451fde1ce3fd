"""The ways by which sums of gradients come together over ranks: memory, memory and hosts, or torch.distributed."""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn

from paceline.collectives.buckets import (
    Strides,
    agreed_strides,
    divide,
    divide_each,
    flat,
    give,
    kinds,
    laid_out,
    pack,
    packed_size,
    unpack,
)
from paceline.collectives.hosts import Hosts
from paceline.collectives.hosts_sum import BUNDLE_BYTES, HostsSum, Nesting
from paceline.collectives.memory import SharedMemory
from paceline.collectives.memory_sum import MAX_TENSORS, Flat, Scratch, TreeSum, in_words
from paceline.collectives.torch_collectives import Exchange
from paceline.collectives.tree import Forest, Grads

Bucket = Sequence[nn.Parameter]
MOST_LEAVING_BYTES = 25 << 20  # of a bucket, between hosts


class Transport(Protocol):
    """How buckets of gradients are added up over ranks. Every rank begins every bucket, in order, and then ends."""

    buckets: Sequence[Bucket]
    early: bool
    """whether buckets leave during backward; else all leave at its end"""

    def begin(self, number: int, own: list[Grads | None]) -> None:
        """Let a bucket leave. `own`: the sums of each of this rank's subtrees, ours to change; None for all zeros."""
        ...

    def end(self, divisor: float | Tensor | None) -> bool:
        """Wait for all buckets, and make every .grad the sum, divided; None: nobody wants the sums.

        Returns:
            Whether all sums are known to be finite, on all ranks alike.
        """
        ...

    def forget(self) -> None:
        """Let go of what is under way."""
        ...


class OverTorch:
    """Over torch.distributed: each bucket is packed into one tensor."""

    early = True

    def __init__(
        self, buckets: Sequence[Bucket], forest: Forest, *, in_order: bool, group: dist.ProcessGroup | None = None
    ) -> None:
        """`in_order`: of the tree; else in the order that the backend likes best, with one all-reduce each."""
        self.buckets, self._forest, self._in_order, self._group = buckets, forest, in_order, group
        self.forget()

    def begin(self, number: int, own: list[Grads | None]) -> None:
        """See Transport."""
        bucket = self.buckets[number]
        size = packed_size(bucket)
        packed = [pack(bucket, grads, self._forest.padded(size) if self._in_order else size) for grads in own]
        self._used.append([any(grads and grads[i] is not None for grads in own) for i in range(len(bucket))])
        exchange = Exchange(self._forest, packed, self._group, f"bucket {number}", in_order=self._in_order)
        self._under_way.append(exchange)

    def end(self, divisor: float | Tensor | None) -> bool:
        """See Transport."""
        for exchange in self._under_way:
            exchange.gather()
        for bucket, used, exchange in zip(self.buckets, self._used, self._under_way, strict=True):
            total = exchange.end()[: packed_size(bucket)]
            if divisor is not None:
                unpack(divide(total, divisor), bucket, used)
        return False

    def forget(self) -> None:
        """See Transport."""
        self._under_way: list[Exchange] = []
        self._used: list[list[bool]] = []


class InMemory:
    """Where all ranks share memory: one bucket, read and written straight where autograd has put its gradients."""

    early = False  # no core is idle on a CPU, so nothing is gained by it, and each bucket would be one copy more

    def __init__(self, parameters: Bucket, memory: SharedMemory | None, forest: Forest, ranks: int = 0) -> None:
        """A collective. One process that has all leaves needs no memory: what it has added up is the sum.

        `ranks`: of the world, where these are not all.
        """
        self.buckets: Sequence[Bucket] = [parameters]
        self._parameters = parameters
        self._strides = agreed_strides(parameters, ranks or len(forest.owned))
        self._sum = None if memory is None else TreeSum(memory, *kinds(parameters), forest)
        self.forget()

    def begin(self, number: int, own: list[Grads | None]) -> None:
        """See Transport."""
        del number
        self._own = [_laid_out(self._parameters, self._strides, grads) for grads in own]

    def end(self, divisor: float | Tensor | None) -> bool:
        """See Transport."""
        first = self._own[0] or [None] * len(self._parameters)
        results: Sequence[Tensor | None] = first
        if self._sum is not None:
            results = self._sum.run([_flat(grads) for grads in self._own], divisor)
        elif divisor is not None:
            divide_each([grad for grad in first if grad is not None], divisor)
        if divisor is not None:
            for parameter, strides, grad, result in zip(self._parameters, self._strides, first, results, strict=True):
                give(parameter, strides, grad, result)
        return self._sum is not None and self._sum.finite

    def forget(self) -> None:
        """See Transport."""
        self._own: list[Grads | None] = []


class OverHosts:
    """In memory on each host, over gloo between hosts. The wire would be idle during backward, though no core is.

    To add up a bucket in memory the ranks of a host wait for each other, as they would at the end of backward.
    """

    early = True

    def __init__(self, buckets: Sequence[Bucket], hosts: Hosts, nesting: Nesting) -> None:
        """A collective. `nesting`: in what order the leaves are added."""
        parameters = [parameter for bucket in buckets for parameter in bucket]
        scratch, strides = Scratch(), iter(agreed_strides(parameters, hosts.size))
        self.buckets, self._memory = buckets, hosts.memory
        self._strides = [[next(strides) for _ in bucket] for bucket in buckets]
        self._sums = [
            HostsSum(hosts, *kinds(bucket), nesting, f"bucket {number}", scratch)
            for number, bucket in enumerate(buckets)
        ]
        # one for all buckets: the hang guard looks at the last 64 calls, and must find the exchanges among them
        self._handing_out = self._memory.called("all_gather", "gradients", *in_words(*kinds(parameters)))
        self.forget()

    def begin(self, number: int, own: list[Grads | None]) -> None:
        """See Transport."""
        bucket = self.buckets[number]
        laid = [_laid_out(bucket, self._strides[number], grads) for grads in own]
        self._first.append(laid[0] or [None] * len(bucket))
        try:
            before = self._sums[number - 1] if number > 0 else None
            self._sums[number].begin([_flat(grads) for grads in laid], after=before)
        except BaseException:
            self.forget()  # we are in a backward, after which nobody calls `end`
            raise

    def end(self, divisor: float | Tensor | None) -> bool:
        """See Transport."""
        with self._memory.operation(self._memory.bulk, self._handing_out):
            sums = [total.end(divisor) for total in self._sums]
        if divisor is not None:
            for bucket, strides, first, results in zip(self.buckets, self._strides, self._first, sums, strict=True):
                for parameter, stride, grad, result in zip(bucket, strides, first, results, strict=True):
                    give(parameter, stride, grad, result)
        return False

    def forget(self) -> None:
        """See Transport; what is under way would keep connections open."""
        self._first: list[Grads] = []
        for total in self._sums:
            total.forget()


def leaving_bytes(hosts: Hosts) -> int:
    """Of a bucket between hosts: each rank's share of it is what travels at once."""
    return min(MOST_LEAVING_BYTES, BUNDLE_BYTES * hosts.memory.size)


def fit_in_memory(parameters: Bucket) -> bool:
    """Whether sums of their gradients can be made in memory that ranks share."""
    return 0 < len(parameters) <= MAX_TENSORS and all(p.device.type == "cpu" and not p.is_complex() for p in parameters)


def _laid_out(bucket: Bucket, strides: Sequence[Strides], grads: Grads | None) -> Grads | None:
    return None if grads is None else [laid_out(g, p, s) for g, p, s in zip(grads, bucket, strides, strict=True)]


def _flat(grads: Grads | None) -> Flat | None:
    return None if grads is None else [flat(grad) for grad in grads]
