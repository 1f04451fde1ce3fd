"""Communicators in shared memory: of one host, or of several, which gloo connects.

`communicator.make_communicator` imports this module when there are several ranks.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives import buckets, shm_collectives
from paceline.collectives import shared_memory as handshake
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
from paceline.collectives.torch_collectives import CPU, WaitFunction, all_gather_json
from paceline.collectives.torch_communicator import BucketReducer, Communicator, TransportChoice, print_on_rank_0
from paceline.errors import ExitCode, ReportedByPeer, UsageError
from paceline.protocol.control import SHARED_MEMORY

MAX_BUCKET_BYTES = 25 << 20  # between hosts
_SILENT_REASON_ENDINGS = ("switched off", "nodes")  # endings of the reasons that are not printed


class SharedMemoryBucketReducer:
    """Sums one bucket in memory that all ranks share. It reads and writes gradients in place, in autograd's memory."""

    overlaps_backward = False  # on a CPU no core is idle during backward, and several buckets would need another copy

    def __init__(
        self, parameters: buckets.Bucket, memory: SharedMemoryGroup | None, partition: LeafPartition, ranks: int = 0
    ) -> None:
        """A collective. `memory`: None if this rank has all leaves. `ranks`: of the world, if `partition` has fewer."""
        self.buckets: Sequence[buckets.Bucket] = [parameters]
        self._parameters = parameters
        self._layouts = buckets.agree_on_gradient_layouts(parameters, ranks or len(partition.ranges))
        numels, self._dtypes = buckets.numels_and_dtypes(parameters)
        self._sum = memory and TreeSum(memory, numels, self._dtypes, partition, layouts=self._layouts)
        self.discard_sums()

    def start_bucket(self, number: int, partials: list[Grads | None]) -> None:
        del number
        self._own = partials
        for grads in partials:
            buckets.convert_gradients_to_layouts(grads, self._dtypes, self._layouts)

    def finish_buckets(self, divisor: float | Tensor | None) -> bool:
        own, self._own = self._own, []
        first: Grads = own[0] or [None] * len(self._parameters)
        results: Sequence[Tensor | None] = first
        if self._sum is not None:
            results = self._sum.run(own, divisor)
        elif divisor is not None:
            buckets.divide_in_place([grad for grad in first if grad is not None], divisor)
        if divisor is not None:
            buckets.assign_grads(self._parameters, results)
        return self._sum is not None and self._sum.finite

    def discard_sums(self) -> None:
        self._own: list[Grads | None] = []


def supports_shared_memory_sum(parameters: buckets.Bucket) -> bool:
    """Whether shared memory can sum the gradients of these parameters."""
    return 0 < len(parameters) <= MAX_TENSORS and all(p.device.type == "cpu" and not p.is_complex() for p in parameters)


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
        return shm_collectives.start_all_gather(self._shared, mine, name)

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

    def make_bucket_reducer(
        self, parameters: buckets.Bucket, partition: LeafPartition, *, in_order: bool
    ) -> BucketReducer:
        if not supports_shared_memory_sum(parameters):
            return super().make_bucket_reducer(parameters, partition, in_order=in_order)
        return SharedMemoryBucketReducer(parameters, self._shared, partition)


class HostsCommunicator(Communicator):
    kind = "hosts"

    def __init__(self, hosts: NodeTopology) -> None:
        super().__init__()
        self.hosts = hosts

    def make_bucket_reducer(
        self, parameters: buckets.Bucket, partition: LeafPartition, *, in_order: bool
    ) -> BucketReducer:
        if not supports_shared_memory_sum(parameters):
            return super().make_bucket_reducer(parameters, partition, in_order=in_order)
        plan = (make_leaf_order_plan if in_order else make_rank_order_plan)(partition, self.hosts.memory.size)
        # a rank sends its part of a bucket in one bundle
        bucket_bytes = min(MAX_BUCKET_BYTES, BUNDLE_BYTES * self.hosts.memory.size)
        return HierarchicalBucketReducer(buckets.group_into_buckets(parameters, bucket_bytes), self.hosts, plan)


def node_topology(communicator: Communicator) -> NodeTopology | None:
    """The hosts of all ranks, if there are several with the same number of ranks each (a collective)."""
    if isinstance(communicator, HostsCommunicator):
        return communicator.hosts
    group = dist.group.WORLD
    if group is None or group.size() == 1 or not _uses_gloo(group):
        return None
    keys = all_gather_json(handshake.node_key(), group.size())
    return make_flat_topology(group, _timeout_seconds(group)) if len(set(keys)) == len(keys) else None


def create_communicator(group: dist.ProcessGroup, choice: TransportChoice) -> Communicator:
    """The communicator of all ranks, `group` (a collective). See `communicator.make_communicator`."""
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
    return HostsCommunicator(make_topology(memory, members.node_index, members.node_count))


def _memory_not_shared(group: dist.ProcessGroup, reason: str) -> UsageError | ReportedByPeer:
    if group.rank() != 0:
        return ReportedByPeer("rank 0 reports why memory cannot be shared", ExitCode.USAGE)
    switch = f", {SHARED_MEMORY}={os.environ[SHARED_MEMORY]}" if SHARED_MEMORY in os.environ else ""
    return UsageError(code="memory-not-shared", size=group.size(), reason=reason, switch=switch)


def _uses_gloo(group: dist.ProcessGroup) -> bool:
    return "cpu:gloo" in str(dist.get_backend_config(group))  # has both backends if the program names none


def _timeout_seconds(group: dist.ProcessGroup) -> float:
    backend = group._get_backend(torch.device(CPU))  # pyright: ignore[reportPrivateUsage]
    return backend.options._timeout.total_seconds()
