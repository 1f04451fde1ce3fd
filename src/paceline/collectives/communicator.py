"""Communicators exchange tensors and messages between the ranks of a process group. All ranks choose the kind once:

    all ranks on one host                                      "shared"   memory
    several hosts with the same number of ranks (2 or more)    "hosts"    gradients: memory and, between hosts, gloo
    otherwise                                                  "torch"    torch.distributed

    make_communicator()                       # the first call is a collective
    get_communicator().start_sum(numbers, "name")()

torch.distributed sends all tensors that are not on the CPU, and all tensors until the choice is made. Each kind has a
transport, which sums gradients.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives import shared_memory as handshake
from paceline.collectives import shm_collectives
from paceline.collectives.buckets import (
    BUCKET_BYTES,
    Bucket,
    PackedBucket,
    agree_on_gradient_layouts,
    assign_grads,
    convert_gradients_to_layouts,
    divide,
    divide_in_place,
    group_into_buckets,
    is_present,
    numels_and_dtypes,
)
from paceline.collectives.hosts import (
    BUNDLE_BYTES,
    HierarchicalBucketReducer,
    NodeTopology,
    make_flat_topology,
    make_leaf_order_plan,
    make_rank_order_plan,
    make_topology,
    node_group_name,
)
from paceline.collectives.shared_memory import (
    BULK_BYTES,
    GROUP_NAME,
    MemoryLayout,
    SharedMemoryGroup,
    SharedMemoryUnavailable,
    connect_shared_memory,
)
from paceline.collectives.shm_collectives import MAX_TENSORS, TreeSum
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
from paceline.errors import ExitCode, ReportedByPeer, UsageError
from paceline.protocol.control import SHARED_MEMORY

TransportChoice = Literal["auto", "shared", "torch"]
_SILENT_REASON_ENDINGS = ("switched off", "nodes")  # endings of the reasons that are not printed


MAX_BUCKET_BYTES = 25 << 20  # between hosts


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


class SharedMemoryBucketReducer:
    """Sums one bucket in memory that all ranks share. It reads and writes gradients in place, in autograd's memory."""

    overlaps_backward = False  # on a CPU no core is idle during backward, and several buckets would need another copy

    def __init__(
        self, parameters: Bucket, memory: SharedMemoryGroup | None, partition: LeafPartition, ranks: int = 0
    ) -> None:
        """A collective. `memory`: None if this rank has all leaves. `ranks`: of the world, if `partition` has fewer."""
        self.buckets: Sequence[Bucket] = [parameters]
        self._parameters = parameters
        self._layouts = agree_on_gradient_layouts(parameters, ranks or len(partition.ranges))
        numels, self._dtypes = numels_and_dtypes(parameters)
        self._sum = memory and TreeSum(memory, numels, self._dtypes, partition, layouts=self._layouts)
        self.discard_sums()

    def start_bucket(self, number: int, partials: list[Grads | None]) -> None:
        del number
        self._own = partials
        for grads in partials:
            convert_gradients_to_layouts(grads, self._dtypes, self._layouts)

    def finish_buckets(self, divisor: float | Tensor | None) -> bool:
        own, self._own = self._own, []
        first: Grads = own[0] or [None] * len(self._parameters)
        results: Sequence[Tensor | None] = first
        if self._sum is not None:
            results = self._sum.run(own, divisor)
        elif divisor is not None:
            divide_in_place([grad for grad in first if grad is not None], divisor)
        if divisor is not None:
            assign_grads(self._parameters, results)
        return self._sum is not None and self._sum.finite

    def discard_sums(self) -> None:
        self._own: list[Grads | None] = []


def supports_shared_memory_sum(parameters: Bucket) -> bool:
    """Whether shared memory can sum the gradients of these parameters."""
    return 0 < len(parameters) <= MAX_TENSORS and all(p.device.type == "cpu" and not p.is_complex() for p in parameters)


class Communicator:
    """Exchanges data over torch.distributed. Every method is a collective or starts one."""

    kind: ClassVar[Literal["shared", "hosts", "torch"]] = "torch"

    def __init__(self, group: Group = None, memory: SharedMemoryGroup | None = None) -> None:
        """`group`: None for all ranks. `memory`: if the ranks share memory."""
        self._group, self.memory = group, memory

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group) if self.memory is None else self.memory.size

    def node_topology(self) -> NodeTopology | None:
        """The hosts of all ranks, if there are several with the same number of ranks each."""
        group = dist.group.WORLD
        if group is None or group.size() == 1 or not _uses_gloo(group):
            return None
        keys = all_gather_json(handshake.node_key(), group.size())
        return make_flat_topology(group, _timeout_seconds(group)) if len(set(keys)) == len(keys) else None

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
        return TorchBucketReducer(
            group_into_buckets(parameters, BUCKET_BYTES), partition, in_order=in_order, group=self._group
        )


class MemoryCommunicator(Communicator):
    """Exchanges data in the memory that ranks share, and what is not on the CPU over torch.distributed."""

    kind = "shared"

    def __init__(self, memory: SharedMemoryGroup) -> None:
        super().__init__(memory=memory)
        self._shared = memory
        self._partition = LeafPartition.one_leaf_per_rank(memory.size, memory.rank)

    def broadcast(self, tensors: Sequence[Tensor], src: int, name: str) -> None:
        if all(tensor.is_cpu for tensor in tensors):
            shm_collectives.broadcast_in_memory(self._shared, tensors, src, name)
        else:
            super().broadcast(tensors, src, name)

    def all_gather_object(self, value: Any, name: str, device: torch.device = CPU) -> list[Any]:
        return super().all_gather_object(value, name)

    def start_all_gather(self, mine: Tensor, name: str) -> WaitFunction:
        if not mine.is_cpu:
            return super().start_all_gather(mine, name)
        rows = mine.new_empty(self.size, len(mine))
        shm_collectives.all_gather(self._shared, mine, rows.view(-1), name)
        return lambda: rows

    def start_sum(self, numbers: Tensor, name: str) -> WaitFunction:
        if not numbers.is_cpu or numbers.nbytes > self._shared.totals.data_bytes:
            return super().start_sum(numbers, name)
        wait = shm_collectives.AsyncAllReduce(self._shared, numbers.tolist(), name).finish
        return lambda: torch.tensor(wait(), dtype=torch.float64)

    def start_float_sum(self, numbers: Sequence[float], name: str) -> Callable[[], list[float]]:
        if len(numbers) > len(self._shared.totals.floats[0][0]):
            return super().start_float_sum(numbers, name)
        return shm_collectives.AsyncAllReduce(self._shared, numbers, name).finish

    def all_gather(self, out: Tensor, mine: Tensor, name: str, *, async_op: bool = False) -> dist.Work | None:
        if not mine.is_cpu:
            return super().all_gather(out, mine, name, async_op=async_op)
        return shm_collectives.all_gather(self._shared, mine, out, name)

    def reduce_scatter(self, out: Tensor, flat: Tensor, name: str) -> None:
        if not flat.is_cpu:
            super().reduce_scatter(out, flat, name)
        else:
            shm_collectives.reduce_scatter(self._shared, [flat], self._partition, out, name=name, as_gloo=True)

    def start_reduce_scatter(self, partition: LeafPartition, partials: Sequence[Tensor], name: str) -> WaitFunction:
        if not partials[0].is_cpu or partials[0].is_complex():
            return super().start_reduce_scatter(partition, partials, name)
        shard = partials[0].new_empty(len(partials[0]) // self.size)
        shm_collectives.reduce_scatter(self._shared, partials, partition, shard, name=name)
        return lambda: shard

    def make_bucket_reducer(self, parameters: Bucket, partition: LeafPartition, *, in_order: bool) -> BucketReducer:
        if not supports_shared_memory_sum(parameters):
            return super().make_bucket_reducer(parameters, partition, in_order=in_order)
        return SharedMemoryBucketReducer(parameters, self._shared, partition)


class _HostsCommunicator(Communicator):
    kind = "hosts"

    def __init__(self, hosts: NodeTopology) -> None:
        super().__init__()
        self._hosts = hosts

    def node_topology(self) -> NodeTopology:
        return self._hosts

    def make_bucket_reducer(self, parameters: Bucket, partition: LeafPartition, *, in_order: bool) -> BucketReducer:
        if not supports_shared_memory_sum(parameters):
            return super().make_bucket_reducer(parameters, partition, in_order=in_order)
        plan = (make_leaf_order_plan if in_order else make_rank_order_plan)(partition, self._hosts.memory.size)
        # a rank sends its part of a bucket in one bundle
        bucket_bytes = min(MAX_BUCKET_BYTES, BUNDLE_BYTES * self._hosts.memory.size)
        return HierarchicalBucketReducer(group_into_buckets(parameters, bucket_bytes), self._hosts, plan)


_chosen: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()
"""Weak keys: an entry ends with torch's process group."""


def get_communicator(group: Group = None) -> Communicator:
    """The communicator of a group (default: all ranks). Before `make_communicator`, one over torch.distributed."""
    key = group or dist.group.WORLD
    return (key and _chosen.get(key)) or Communicator(group)


def make_communicator(choice: TransportChoice = "auto", group: Group = None) -> Communicator:
    """Make the communicator of a group: the default one, or one with all ranks in the same order.

    The first call is a collective. Later calls return its result. Rank 0 prints once why ranks do not share memory.

    Args:
        choice: "shared" fails if memory cannot be shared, "torch" does not try.
        group: a group with only some of the ranks uses torch.distributed.

    Raises:
        UsageError: on rank 0, if `choice` is "shared" and memory cannot be shared.
        ReportedByPeer: on the other ranks.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1 or (group is not None and group.size() < world.size()):
        return get_communicator(group)
    if world not in _chosen:
        _chosen[world] = _create(world, choice)
    if group is not None:
        _chosen[group] = _chosen[world]
    return _chosen[world]


def _create(group: dist.ProcessGroup, choice: TransportChoice) -> Communicator:
    if not _uses_gloo(group):
        if choice == "shared":
            raise _memory_not_shared(group, f"the ranks' backend is {dist.get_backend(group)}")
        return Communicator()
    layout = MemoryLayout(group.size(), BULK_BYTES)
    try:
        members = connect_shared_memory(group.rank(), layout, wanted=choice != "torch")
    except SharedMemoryUnavailable as refusal:
        if choice == "shared":
            raise _memory_not_shared(group, str(refusal)) from None
        if not str(refusal).endswith(_SILENT_REASON_ENDINGS):
            print_on_rank_0(f"ranks talk over gloo, not through shared memory: {refusal}")
        return Communicator()
    several, index = members.node_count > 1, [peer.rank for peer in members.peers].index(group.rank())
    name, seconds = node_group_name(members.node_index) if several else GROUP_NAME, _timeout_seconds(group)
    memory = SharedMemoryGroup(members.peers, index, layout, seconds, group=name)
    # When the group or the process ends, ranks that wait for this rank get an error.
    weakref.finalize(group, memory.mark_as_left)
    if not several:
        return MemoryCommunicator(memory)
    print_on_rank_0(
        f"gradients are added up in shared memory on each of {members.node_count} nodes ({memory.size} ranks each), "
        "and over gloo between nodes"
    )
    return _HostsCommunicator(make_topology(memory, members.node_index, members.node_count))


def _uses_gloo(group: dist.ProcessGroup) -> bool:
    return "cpu:gloo" in str(dist.get_backend_config(group))  # has both backends if the program names none


def print_on_rank_0(text: str) -> None:
    """Print a notice on rank 0 of the default group."""
    if dist.group.WORLD is None or dist.group.WORLD.rank() == 0:
        print(f"paceline: {text}", file=sys.stderr, flush=True)


def _memory_not_shared(group: dist.ProcessGroup, reason: str) -> UsageError | ReportedByPeer:
    if group.rank() != 0:
        return ReportedByPeer("rank 0 reports why memory cannot be shared", ExitCode.USAGE)
    switch = f", {SHARED_MEMORY}={os.environ[SHARED_MEMORY]}" if SHARED_MEMORY in os.environ else ""
    return UsageError(code="memory-not-shared", size=group.size(), reason=reason, switch=switch)


def _timeout_seconds(group: dist.ProcessGroup) -> float:
    backend = group._get_backend(torch.device(CPU))  # pyright: ignore[reportPrivateUsage]
    return backend.options._timeout.total_seconds()
