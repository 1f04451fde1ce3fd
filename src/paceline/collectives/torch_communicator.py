"""A communicator over torch.distributed; the others are in `shm_communicator`."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives.buckets import (
    BUCKET_BYTES,
    Bucket,
    PackedBucket,
    agree_on_gradient_layouts,
    divide,
    group_into_buckets,
    is_present,
)
from paceline.collectives.sum_tree import Grads, LeafPartition
from paceline.collectives.torch_collectives import (
    CPU,
    Group,
    TreeAllReduce,
    WaitFunction,
    all_gather_json,
    gather_shards,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    tag_collective,
)

if TYPE_CHECKING:
    from paceline.collectives.shared_memory import SharedMemoryGroup

TransportChoice = Literal["auto", "shared", "torch"]


class BucketReducer(Protocol):
    """Sums buckets of gradients over ranks. Every rank calls `begin` for each bucket in order, and then `end`."""

    buckets: Sequence[Bucket]
    overlaps_backward: bool
    """Whether buckets are sent during backward, not at its end."""

    def start_bucket(self, number: int, partials: list[Grads | None]) -> None:
        """Start to sum a bucket, given the sums of this rank's subtrees, which it may change. None: all zeros."""
        ...

    def finish_buckets(self, divisor: float | Tensor | None) -> bool:
        """Wait for all buckets, and set every .grad to the sum divided by `divisor`. None: only discard the sums.

        Returns:
            True if all sums are finite, False if that is unknown. The same on all ranks.
        """
        ...

    def discard_sums(self) -> None:
        """Discard the running sums after an error."""
        ...


class TorchBucketReducer:
    """Packs each bucket into one tensor, and sums it with torch.distributed."""

    overlaps_backward = True

    def __init__(
        self, buckets: Sequence[Bucket], partition: LeafPartition, *, in_order: bool, group: Group = None
    ) -> None:
        """A collective. `in_order`: add in the order of the tree, not in that of the backend's all-reduce."""
        parameters = [parameter for bucket in buckets for parameter in bucket]
        layouts = iter(agree_on_gradient_layouts(parameters, len(partition.ranges), group))
        padded_size = partition.padded if in_order else int
        self._packed = [PackedBucket(bucket, [next(layouts) for _ in bucket], padded_size) for bucket in buckets]
        self.buckets, self._partition, self._in_order, self._group = buckets, partition, in_order, group
        self.discard_sums()

    def start_bucket(self, number: int, partials: list[Grads | None]) -> None:
        flat = [*map(self._packed[number].pack, partials)]
        present = [[*map(is_present, grads)] for grads in partials if grads is not None]
        self._used.append([*map(any, zip(*present, strict=True))] or [False] * len(self.buckets[number]))
        exchange = TreeAllReduce(self._partition, flat, self._group, f"bucket {number}", in_order=self._in_order)
        self._pending.append(exchange)

    def finish_buckets(self, divisor: float | Tensor | None) -> bool:
        for exchange in self._pending:
            exchange.start_gather()  # of all, before it waits for one
        for packed, used, exchange in zip(self._packed, self._used, self._pending, strict=True):
            total = exchange.wait()
            if divisor is not None:
                packed.unpack(divide(total[: packed.size], divisor), used)
        self.discard_sums()
        return False

    def discard_sums(self) -> None:
        self._pending: list[TreeAllReduce] = []
        self._used: list[list[bool]] = []


class Communicator:
    """Exchanges data over torch.distributed. Every method is a collective or starts one."""

    kind: ClassVar[Literal["shared", "hosts", "torch"]] = "torch"

    def __init__(self, group: Group = None, memory: "SharedMemoryGroup | None" = None) -> None:
        """`group`: None for all ranks. `memory`: if the ranks share memory."""
        self._group, self.memory = group, memory

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group) if self.memory is None else self.memory.size

    def broadcast(self, tensors: Sequence[Tensor], src: int, name: str) -> None:
        """Copy the contiguous tensors of rank `src` into those of all ranks."""
        for tensor in tensors:  # as bytes: gloo supports few types
            dist.broadcast(tag_collective(tensor.view(-1).view(torch.uint8), name), group=self._group, group_src=src)

    def all_gather_object(self, value: Any, name: str, device: torch.device = CPU) -> list[Any]:
        """The `value` (JSON) of all ranks, by rank."""
        return all_gather_json(value, self.size, device, name=name, start=self.start_all_gather)

    def start_all_gather(self, mine: Tensor, name: str) -> WaitFunction:
        """Start an all-gather of `mine`, (n,) on all ranks. The returned function waits and returns (ranks, n)."""
        return start_all_gather(mine, name, self._group)

    def start_sum(self, numbers: Tensor, name: str) -> WaitFunction:
        """Start an all-reduce of a few `numbers`, (n,) float64, in the order of ranks. The returned function waits."""
        return start_all_reduce(numbers, name, self._group) if self.size > 1 else lambda: numbers

    def start_float_sum(self, numbers: Sequence[float], name: str) -> Callable[[], list[float]]:
        """The same for numbers on the host."""
        wait = self.start_sum(torch.tensor(numbers, dtype=torch.float64), name)
        return lambda: wait().tolist()

    def all_gather(self, out: Tensor, mine: Tensor, name: str, *, async_op: bool = False) -> dist.Work | None:
        """All-gather: `mine` (s,) of rank r becomes `out`[r * s : (r + 1) * s]."""
        return gather_shards(out, tag_collective(mine, name), self._group, async_op=async_op)

    def reduce_scatter(self, out: Tensor, flat: Tensor, name: str) -> None:
        """Reduce-scatter of `flat` (n,) into `out` (n / W,), in the order of the backend (see `ring_sum`)."""
        dist.reduce_scatter_single(tag_collective(out, name), flat, group=self._group)

    def start_reduce_scatter(self, partition: LeafPartition, partials: Sequence[Tensor], name: str) -> WaitFunction:
        """Start a reduce-scatter over all leaves in the order of the tree. The returned function waits."""
        return start_reduce_scatter(partition, partials, name, self._group)

    def make_bucket_reducer(self, parameters: Bucket, partition: LeafPartition, *, in_order: bool) -> BucketReducer:
        """The all-reduce of gradients. `in_order`: in the order of the tree, not in the cheapest one."""
        buckets = group_into_buckets(parameters, BUCKET_BYTES)
        return TorchBucketReducer(buckets, partition, in_order=in_order, group=self._group)


def print_on_rank_0(text: str) -> None:
    """Print a notice on rank 0 of the default group."""
    if dist.group.WORLD is None or dist.group.WORLD.rank() == 0:
        print(f"paceline: {text}", file=sys.stderr, flush=True)
