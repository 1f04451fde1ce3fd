"""Sums over the ranks of several hosts: in shared memory on each host, over gloo between hosts.

    2 hosts of 3 ranks      share memory: 0 1 2 | 3 4 5      exchange over gloo: 0 3 | 1 4 | 2 5

Each host adds up its largest subtrees in shared memory, chunk by chunk. Rank i of a host keeps the i-th shard of each
chunk. Several chunks form a bundle, which rank i exchanges over gloo with rank i of all other hosts (`TreeAllReduce`
over a tree whose leaves are the hosts: the additions and their order are those of one process). A host therefore sends
the same amount of data as a single rank would, for any number of ranks. Finally, shared memory distributes the sums
within the host. While one bundle is sent, the next ones are added up.

    V = 6, 2 hosts of 3 ranks      host 0: a+b in memory, and c        host 1: d, and e+f in memory
                                   over gloo, a third by each rank:    ((a+b) + (c+d)) + (e+f)
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives import shm_collectives
from paceline.collectives.buckets import (
    Bucket,
    Layout,
    agree_on_gradient_layouts,
    assign_grads,
    convert_gradients_to_layouts,
    divide,
    numels_and_dtypes,
)
from paceline.collectives.shared_memory import GROUP_NAME, MemoryLayout, MemoryPeer, SharedMemoryGroup
from paceline.collectives.sum_tree import ALIGNMENT_ELEMENTS, Grads, LeafPartition, TreeNode
from paceline.collectives.torch_collectives import TreeAllReduce

BUNDLE_BYTES = 1 << 20  # for each rank: large enough to hide gloo's latency, and the first bundle is sent early


@dataclass(frozen=True)
class NodeTopology:
    """This rank's position among several hosts, all with the same number of consecutive ranks."""

    memory: SharedMemoryGroup  # of the ranks of this host
    node_index: int  # of this host, from 0
    node_count: int  # of hosts
    # A strong reference would keep the connections of the group open after torch has destroyed it.
    _across: weakref.ref[dist.ProcessGroup]

    @property
    def size(self) -> int:
        return self.node_count * self.memory.size

    @property
    def rank(self) -> int:
        return self.node_index * self.memory.size + self.memory.rank

    def gather(self, value: Any) -> dict[int, Any]:
        """The `value` (JSON) of the ranks of this host, by rank of the world."""
        values = shm_collectives.all_gather_object(self.memory, value, "messages of a node")
        return dict(enumerate(values, self.node_index * self.memory.size))

    def inter_node_group(self) -> dist.ProcessGroup:
        """The process group of the ranks with the same number on each host, in the order of hosts."""
        group = self._across()
        if group is None:
            raise RuntimeError("the process groups are destroyed: this rank is no longer connected to other nodes")
        return group


def node_group_name(host: int) -> str:
    """The name, in the hang guard, of the group of ranks that share memory on one of several hosts."""
    return f"{GROUP_NAME} on host {host}"


def make_topology(memory: SharedMemoryGroup, host: int, hosts: int) -> NodeTopology:
    """Create the process groups between hosts (a collective of all ranks)."""
    size, timeout = memory.size, timedelta(seconds=memory.timeout_seconds)  # torch's default is half an hour
    # every rank must create all groups, in the same order
    groups = [dist.new_group([*range(i, hosts * size, size)], timeout=timeout, backend="gloo") for i in range(size)]
    group = groups[memory.rank]
    assert isinstance(group, dist.ProcessGroup)
    return NodeTopology(memory, host, hosts, weakref.ref(group))


def make_flat_topology(group: dist.ProcessGroup, timeout_seconds: float) -> NodeTopology:
    rank, layout = group.rank(), MemoryLayout(1, bulk_bytes=4096)
    alone = MemoryPeer(rank, os.getpid(), 0, memoryview(bytearray(layout.total_bytes)))
    memory = SharedMemoryGroup([alone], 0, layout, timeout_seconds, group=node_group_name(rank))
    return NodeTopology(memory, rank, group.size(), weakref.ref(group))


@dataclass(frozen=True)
class NodeSubtree:
    """One sum of a host. The nodes of `parts` count from its first leaf."""

    leaf_count: int
    lane_by_part: Mapping[TreeNode, shm_collectives.LaneAddress]


@dataclass(frozen=True)
class HierarchicalSumPlan:
    node_subtrees: Sequence[NodeSubtree]  # the sums of this host
    max_lanes: int  # the largest number of lanes of any rank of the world
    node_partition: LeafPartition  # its ranks are the hosts


Bundle = Sequence[shm_collectives.TensorChunk]
"""Chunks of one type; each rank sends its shard of all of them in one message."""


def make_leaf_order_plan(partition: LeafPartition, size: int) -> HierarchicalSumPlan:
    """The plan in the order of the tree over all leaves. `partition` has all ranks, `size` on each host."""
    nodes, number = partition.subtrees_by_rank, partition.rank // size
    firsts = range(0, len(partition.ranges), size)
    bounds = [(partition.ranges[first][0], partition.ranges[first + size - 1][1]) for first in firsts]
    across = LeafPartition(bounds, number)
    lanes = shm_collectives.assign_subtree_lanes(nodes[number * size : (number + 1) * size])
    within = [
        NodeSubtree(
            stop - first, {(a - first, b - first): at for (a, b), at in lanes.items() if first <= a and b <= stop}
        )
        for first, stop in across.subtrees_by_rank[number]
    ]
    return HierarchicalSumPlan(within, max(map(len, nodes)), across)


def make_rank_order_plan(partition: LeafPartition, size: int) -> HierarchicalSumPlan:
    """The plan in a cheaper order, over the ranks of `partition`: each host has one sum, for any number of ranks."""
    host = NodeSubtree(size, {(rank, rank + 1): (rank, 0) for rank in range(size)})
    across = LeafPartition.one_leaf_per_rank(len(partition.ranges) // size, partition.rank // size)
    return HierarchicalSumPlan([host], 1, across)


class HierarchicalBucketReducer:
    """A `BucketReducer` in memory on each host, and over gloo between hosts.

    It sends buckets during backward, when the network is idle. To add up a bucket in memory, the ranks of a host wait
    for each other, as they would at the end of backward.
    """

    overlaps_backward = True

    def __init__(self, buckets: Sequence[Bucket], hosts: NodeTopology, plan: HierarchicalSumPlan) -> None:
        """A collective. `plan` defines the order of additions."""
        parameters = [parameter for bucket in buckets for parameter in bucket]
        scratch, layouts = shm_collectives.ScratchBuffers(), iter(agree_on_gradient_layouts(parameters, hosts.size))
        self.buckets = buckets
        self._sums = [
            HierarchicalSum(hosts, bucket, [next(layouts) for _ in bucket], plan, f"bucket {number}", scratch)
            for number, bucket in enumerate(buckets)
        ]
        # One call for all buckets: the hang guard reads only the last 64 calls, and needs the exchanges among them.
        specs = shm_collectives.describe_tensors(*numels_and_dtypes(parameters))
        self._all_gather = hosts.memory.operation("all_gather", "gradients", *specs)
        self.discard_sums()

    def start_bucket(self, number: int, partials: list[Grads | None]) -> None:
        try:
            self._last = self._sums[number].begin(partials, self._last)
        except BaseException:
            self.discard_sums()  # an error during backward: `finish_buckets` will not be called
            raise

    def finish_buckets(self, divisor: float | Tensor | None) -> bool:
        if self._last is not None:
            self._last.start_gather()
        with self._all_gather:
            sums = [total.end(divisor) for total in self._sums]
        if divisor is not None:
            for bucket, results in zip(self.buckets, sums, strict=True):
                assign_grads(bucket, results)
        self._last = None
        return False

    def discard_sums(self) -> None:
        """Running sums would keep connections open."""
        self._last: TreeAllReduce | None = None
        for total in self._sums:
            total.discard_exchanges()


class HierarchicalSum:
    """The sum of one bucket, as `TreeSum`, but in two phases, `begin` and `end`."""

    def __init__(
        self, hosts: NodeTopology, bucket: Bucket, layouts: Sequence[Layout], plan: HierarchicalSumPlan, name: str,
        scratch: shm_collectives.ScratchBuffers,
    ) -> None:  # fmt: skip
        self._hosts, self._memory, self._plan, self._name = hosts, hosts.memory, plan, name
        self._layouts, (sizes, dtypes) = layouts, numels_and_dtypes(bucket)
        unit = ALIGNMENT_ELEMENTS * self._memory.size
        lane_sizes = {d: self._memory.bulk.data_bytes // d.itemsize // plan.max_lanes // unit * unit for d in dtypes}
        self._lanes = shm_collectives.SlotBuffers(self._memory, sizes, dtypes, lane_sizes, scratch, layouts)
        # if no tensor has elements, an empty bundle sends the flags
        self._bundles, self._dtypes = _bundle_chunks(self._lanes.chunks, self._memory.size) or [()], dtypes
        self.discard_exchanges()
        specs = shm_collectives.describe_tensors(sizes, dtypes)
        self._operation = self._memory.operation("reduce_scatter", name, *specs)

    def begin(self, partials: list[Grads | None], last: TreeAllReduce | None) -> TreeAllReduce | None:
        """Add up the gradients of this host's ranks, and start to send the sums (a collective).

        Several sums may begin before the first one ends, in the same order on all ranks. The second half of `last`, the
        last exchange of the previous sum, starts during the first half of this one. Returns the last exchange.
        """
        self._own = [convert_gradients_to_layouts(grads, self._dtypes, self._layouts) for grads in partials]
        with self._operation:
            for bundle in self._bundles:
                self._pending.append(self._send(bundle, first=not self._pending))
                if last is not None:
                    last.start_gather()
                last = self._pending[-1]
        return last

    def end(self, divisor: float | Tensor | None) -> list[Tensor | None]:
        """Wait for the sum over all ranks, and distribute it within this host; returns as `TreeSum.run`.

        Runs within a collective of the memory, which the caller has begun (`SharedMemoryGroup.operation`).
        """
        results: list[Tensor | None] = []
        for number, bundle in enumerate(self._bundles):
            flat, size = self._pending.popleft().wait(), self._width(bundle)
            if number == 0:
                results = self._lanes.allocate_results(self._own, flat[size : size + len(self._dtypes)].bool().tolist)
            if divisor is not None:
                divide(flat[:size], divisor)
            self._distribute(bundle, flat, results)
        self.discard_exchanges()
        return results

    def discard_exchanges(self) -> None:
        self._pending = deque[TreeAllReduce]()
        self._own: Sequence[shm_collectives.TensorList | None] = ()

    def _send(self, bundle: Bundle, *, first: bool) -> TreeAllReduce:
        plan, size, flags = self._plan, self._width(bundle), len(self._dtypes) if first else 0
        # at least one element: gloo must not send an empty message
        shape = len(plan.node_subtrees), plan.node_partition.padded(max(1, size + flags))
        sums = torch.empty(shape, dtype=bundle[0].dtype if bundle else self._dtypes[0])
        sums[:, size:] = 0
        at = 0
        for number, chunk in enumerate(bundle or [None]):
            slot = self._lanes.exchange_chunk(chunk, self._own, is_first=first and number == 0)
            if first and number == 0:
                sums[0, size : size + flags] = torch.tensor(self._lanes.read_used_flags()).to(sums.dtype)
            if chunk is not None:
                at += self._add_up(chunk, slot, sums[:, at:])
        return TreeAllReduce(plan.node_partition, [*sums.unbind()], self._hosts.inter_node_group(), self._name)

    def _add_up(self, chunk: shm_collectives.TensorChunk, slot: int, sums: Tensor) -> int:
        """Write the sums of this rank's shard of a chunk to the start of `sums` (subtrees, n); return their length."""
        start, stop = self._lanes.shard_range(chunk, self._memory.rank)
        width = stop - start
        for subtree, row in zip(self._plan.node_subtrees, sums, strict=True):
            parts, out = self._lanes.subtree_views(subtree.lane_by_part, chunk, slot, start, stop), row[:width]
            if len(parts) == 1:
                out.copy_(next(iter(parts.values())))
            else:
                count = shm_collectives.spare_buffer_count(parts, subtree.leaf_count)
                spare = self._lanes.spare_buffers(chunk.dtype, count, width)
                shm_collectives.sum_subtrees(parts, subtree.leaf_count, out, spare, None)
        return width

    def _distribute(self, bundle: Bundle, flat: Tensor, results: shm_collectives.Results) -> None:
        bulk, at = self._memory.bulk, 0
        for chunk in bundle:
            start, stop = self._lanes.shard_range(chunk, self._memory.rank)
            slot = bulk.begin_tick()
            bulk.view(chunk.dtype, slot, self._memory.rank, 0, stop - start).copy_(flat[at : at + stop - start])
            at += stop - start
            bulk.publish_and_wait()
            self._lanes.collect_results(chunk, slot, 0, results)

    def _width(self, bundle: Bundle) -> int:
        shards = [self._lanes.shard_range(chunk, self._memory.rank) for chunk in bundle]
        return sum(stop - start for start, stop in shards)


def _bundle_chunks(chunks: Sequence[shm_collectives.TensorChunk], ranks: int) -> Sequence[Bundle]:
    bundles: list[list[shm_collectives.TensorChunk]] = []
    for chunk in chunks:
        last = bundles[-1] if bundles else []
        size = sum(other.size for other in last) * chunk.dtype.itemsize // ranks
        if last and last[0].dtype == chunk.dtype and size < BUNDLE_BYTES:
            last.append(chunk)
        else:
            bundles.append([chunk])
    return bundles
