"""The transports of gradients: shared memory, shared memory and hosts, or torch.distributed."""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn

from paceline.collectives.buckets import (
    agreed_strides,
    assign_grads,
    divide,
    divide_each,
    flat,
    laid_out,
    numels_and_dtypes,
    pack,
    packed_size,
    unpack,
)
from paceline.collectives.hosts import BUNDLE_BYTES, HierarchyPlan, Hosts, HostsSum
from paceline.collectives.memory import SharedMemory
from paceline.collectives.memory_sum import MAX_TENSORS, Scratch, TreeSum, in_words
from paceline.collectives.torch_collectives import Exchange
from paceline.collectives.tree import Forest, Grads

Bucket = Sequence[nn.Parameter]
MOST_LEAVING_BYTES = 25 << 20  # of a bucket between hosts


class Transport(Protocol):
    """Sums buckets of gradients over ranks. Every rank begins every bucket in order, and then calls `end`."""

    buckets: Sequence[Bucket]
    early: bool
    """whether buckets are sent during backward; else at its end"""

    def begin(self, number: int, own: list[Grads | None]) -> None:
        """Start to sum a bucket. `own`: the sums of each of this rank's subtrees, may be changed; None: all zeros."""
        ...

    def end(self, divisor: float | Tensor | None) -> bool:
        """Wait for all buckets, and make every .grad the sum, divided. None: drop the sums.

        Returns:
            Whether all sums are known to be finite; the same on all ranks.
        """
        ...

    def forget(self) -> None:
        """Drop the sums under way."""
        ...


class TorchTransport:
    """Packs each bucket into one tensor, and sums it over torch.distributed."""

    early = True

    def __init__(
        self, buckets: Sequence[Bucket], forest: Forest, *, in_order: bool, group: dist.ProcessGroup | None = None
    ) -> None:
        """`in_order`: in the order of the tree, else in that of the backend's all-reduce."""
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


class MemoryTransport:
    """Sums one bucket in memory that all ranks share; gradients are read and written where autograd has put them."""

    early = False  # no core is idle on a CPU, and each bucket would be another copy

    def __init__(self, parameters: Bucket, memory: SharedMemory | None, forest: Forest, ranks: int = 0) -> None:
        """A collective. Without memory, this rank has all leaves. `ranks`: of the world, if `forest` has fewer."""
        self.buckets: Sequence[Bucket] = [parameters]
        self._parameters = parameters
        self._strides = agreed_strides(parameters, ranks or len(forest.owned))
        self._sum = None if memory is None else TreeSum(memory, *numels_and_dtypes(parameters), forest)
        self.forget()

    def begin(self, number: int, own: list[Grads | None]) -> None:
        """See Transport."""
        del number
        self._own = [laid_out(grads, self._parameters, self._strides) for grads in own]

    def end(self, divisor: float | Tensor | None) -> bool:
        """See Transport."""
        first: Grads = self._own[0] or [None] * len(self._parameters)
        results: Sequence[Tensor | None] = first
        if self._sum is not None:
            results = self._sum.run([*map(flat, self._own)], divisor)
        elif divisor is not None:
            divide_each([grad for grad in first if grad is not None], divisor)
        if divisor is not None:
            assign_grads(self._parameters, self._strides, first, results)
        return self._sum is not None and self._sum.finite

    def forget(self) -> None:
        """See Transport."""
        self._own: list[Grads | None] = []


class HierarchicalTransport:
    """Sums buckets in memory on each host, and over gloo between hosts.

    Buckets leave during backward because the network is idle then. To add up a bucket in memory, the ranks of a host
    wait for each other, as they would at the end of backward.
    """

    early = True

    def __init__(self, buckets: Sequence[Bucket], hosts: Hosts, plan: HierarchyPlan) -> None:
        """A collective. `plan`: the order of additions."""
        parameters = [parameter for bucket in buckets for parameter in bucket]
        scratch, strides = Scratch(), iter(agreed_strides(parameters, hosts.size))
        self.buckets, self._memory = buckets, hosts.memory
        self._strides = [[next(strides) for _ in bucket] for bucket in buckets]
        self._sums = [
            HostsSum(hosts, *numels_and_dtypes(bucket), plan, f"bucket {number}", scratch)
            for number, bucket in enumerate(buckets)
        ]
        # one call for all buckets: the hang guard reads the last 64 calls, and must find the exchanges among them
        self._handing_out = self._memory.called("all_gather", "gradients", *in_words(*numels_and_dtypes(parameters)))
        self.forget()

    def begin(self, number: int, own: list[Grads | None]) -> None:
        """See Transport."""
        bucket = self.buckets[number]
        laid = [laid_out(grads, bucket, self._strides[number]) for grads in own]
        self._first.append(laid[0] or [None] * len(bucket))
        try:
            before = self._sums[number - 1] if number > 0 else None
            self._sums[number].begin([*map(flat, laid)], after=before)
        except BaseException:
            self.forget()  # this is in a backward: `end` will not be called
            raise

    def end(self, divisor: float | Tensor | None) -> bool:
        """See Transport."""
        with self._memory.operation(self._memory.bulk, self._handing_out):
            sums = [total.end(divisor) for total in self._sums]
        if divisor is not None:
            for bucket, strides, first, results in zip(self.buckets, self._strides, self._first, sums, strict=True):
                assign_grads(bucket, strides, first, results)
        return False

    def forget(self) -> None:
        """See Transport. Sums under way would keep connections open."""
        self._first: list[Grads] = []
        for total in self._sums:
            total.forget()


def leaving_bytes(hosts: Hosts) -> int:
    """The size of a bucket between hosts; each rank's share of it is one message."""
    return min(MOST_LEAVING_BYTES, BUNDLE_BYTES * hosts.memory.size)


def fit_in_memory(parameters: Bucket) -> bool:
    """Whether shared memory can sum their gradients."""
    return 0 < len(parameters) <= MAX_TENSORS and all(p.device.type == "cpu" and not p.is_complex() for p in parameters)
