"""Communicators exchange tensors and messages between the ranks of a process group. All ranks choose the kind once.

    all ranks on one host                                      "shared"   memory
    several hosts with the same number of ranks (2 or more)    "hosts"    gradients: memory and, between hosts, gloo
    otherwise                                                  "torch"    torch.distributed

    make_communicator()                       # a collective, at its first call
    communicator().start_sum(numbers, "name")()

torch.distributed always sends tensors on other devices than the CPU, and all tensors before the choice. Each kind has a
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
from torch import Tensor, nn

from paceline.collectives import memory as handshake
from paceline.collectives import memory_sum
from paceline.collectives.buckets import (
    BUCKET_BYTES,
    agreed_strides,
    assign_grads,
    buckets_of,
    divide,
    divide_each,
    flat,
    laid_out,
    numels_and_dtypes,
    pack,
    packed_size,
    unpack,
)
from paceline.collectives.hosts import (
    BUNDLE_BYTES,
    HierarchyPlan,
    Hosts,
    HostsSum,
    by_leaf,
    by_rank,
    connect_hosts,
    group_name,
    hosts_of_one,
)
from paceline.collectives.memory import BULK_BYTES, GROUP, MemoryLayout, Refusal, SharedMemory, meet_in_memory
from paceline.collectives.memory_sum import MAX_TENSORS, Scratch, TreeSum, in_words
from paceline.collectives.torch_collectives import (
    CPU,
    AllToAll,
    Exchange,
    gather_over_torch,
    gather_shares,
    labelled,
    start_gather,
    start_sum,
)
from paceline.collectives.tree import Forest, Grads
from paceline.errors import ExitCode, ReportedByPeer, UsageError
from paceline.protocol.control import SHARED_MEMORY

Asked = Literal["auto", "shared", "torch"]
_QUIET = ("switched off", "hosts")  # reasons that are not printed


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


def fit_in_memory(parameters: Bucket) -> bool:
    """Whether shared memory can sum their gradients."""
    return 0 < len(parameters) <= MAX_TENSORS and all(p.device.type == "cpu" and not p.is_complex() for p in parameters)


class Communicator:
    """Uses torch.distributed. Every method except `hosts` is a collective or starts one."""

    kind: ClassVar[Literal["shared", "hosts", "torch"]] = "torch"

    def __init__(self, group: dist.ProcessGroup | None = None, memory: SharedMemory | None = None) -> None:
        """`group`: None for all ranks. `memory`: the memory that the ranks share."""
        self._group, self.memory = group, memory

    @property
    def size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self._group) if self.memory is None else self.memory.size

    def hosts(self) -> Hosts | None:
        """The hosts of all ranks, if there are several with the same number of ranks (a collective)."""
        group = dist.group.WORLD
        if group is None or group.size() == 1 or not _talks_over_gloo(group):
            return None
        keys = gather_over_torch(handshake.host_key(), group.size())
        return hosts_of_one(group, _timeout_seconds(group)) if len(set(keys)) == len(keys) else None

    def broadcast(self, tensors: Sequence[Tensor], src: int, name: str) -> None:
        """Copy the contiguous tensors of rank `src` into those of all ranks."""
        for tensor in tensors:  # as bytes: gloo knows few types
            dist.broadcast(labelled(tensor.view(-1).view(torch.uint8), name), group=self._group, group_src=src)

    def gather(self, words: Any, name: str, device: torch.device = CPU) -> list[Any]:
        """The `words` (a JSON value) of all ranks, by rank."""
        return gather_over_torch(words, self.size, device, name=name, start=self.start_gather)

    def start_gather(self, mine: Tensor, name: str) -> Callable[[], Tensor]:
        """Start an all-gather of `mine`, (n,) on all ranks. The returned function waits and returns (ranks, n)."""
        return start_gather(mine, name, self._group)

    def start_sum(self, numbers: Tensor, name: str) -> Callable[[], Tensor]:
        """Start an all-reduce of a few `numbers`, (n,), in the order of ranks. The returned function waits."""
        return start_sum(numbers, name, self._group) if self.size > 1 else lambda: numbers

    def all_gather(self, out: Tensor, mine: Tensor, name: str, *, async_op: bool = False) -> dist.Work | None:
        """All-gather: `mine` (s,) of rank r becomes `out`[r * s : (r + 1) * s]."""
        return gather_shares(out, labelled(mine, name), self._group, async_op=async_op)

    def reduce_scatter(self, out: Tensor, flat: Tensor, name: str, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce-scatter of `flat` (n,) into `out` (n / W,), in the order of the backend (see `ring_sum`)."""
        dist.reduce_scatter_single(labelled(out, name), flat, op=op, group=self._group)

    def start_share_of_sum(self, forest: Forest, own: Sequence[Tensor], name: str) -> Callable[[], Tensor]:
        """Start a reduce-scatter over all leaves in the order of the tree. The returned function waits."""
        return AllToAll(forest, own, self._group, name).end

    def transport(self, parameters: Bucket, forest: Forest, *, in_order: bool) -> Transport:
        """The all-reduce of gradients. `in_order`: in the order of the tree, else in the cheapest order."""
        return TorchTransport(buckets_of(parameters, BUCKET_BYTES), forest, in_order=in_order, group=self._group)


class _MemoryCommunicator(Communicator):
    kind = "shared"

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__(memory=memory)
        self._shared = memory
        self._forest = Forest.of_ranks(memory.size, memory.rank)

    def broadcast(self, tensors: Sequence[Tensor], src: int, name: str) -> None:
        if all(tensor.is_cpu for tensor in tensors):
            memory_sum.broadcast_in_memory(self._shared, tensors, src, name)
        else:
            super().broadcast(tensors, src, name)

    def gather(self, words: Any, name: str, device: torch.device = CPU) -> list[Any]:
        return super().gather(words, name)

    def start_gather(self, mine: Tensor, name: str) -> Callable[[], Tensor]:
        if not mine.is_cpu:
            return super().start_gather(mine, name)
        rows = mine.new_empty(self.size, len(mine))
        memory_sum.all_gather(self._shared, mine, rows.view(-1), name)
        return lambda: rows

    def start_sum(self, numbers: Tensor, name: str) -> Callable[[], Tensor]:
        if not numbers.is_cpu or numbers.nbytes > self._shared.totals.data_bytes:
            return super().start_sum(numbers, name)
        return memory_sum.StartedSum(self._shared, numbers, name).finish

    def all_gather(self, out: Tensor, mine: Tensor, name: str, *, async_op: bool = False) -> dist.Work | None:
        if not mine.is_cpu:
            return super().all_gather(out, mine, name, async_op=async_op)
        return memory_sum.all_gather(self._shared, mine, out, name)

    def reduce_scatter(self, out: Tensor, flat: Tensor, name: str, op: Any = dist.ReduceOp.SUM) -> None:
        if not flat.is_cpu or op != dist.ReduceOp.SUM:
            super().reduce_scatter(out, flat, name, op)
        else:
            memory_sum.reduce_scatter(self._shared, [flat], self._forest, out, name=name, as_gloo=True)

    def start_share_of_sum(self, forest: Forest, own: Sequence[Tensor], name: str) -> Callable[[], Tensor]:
        if not own[0].is_cpu or own[0].is_complex():
            return super().start_share_of_sum(forest, own, name)
        share = own[0].new_empty(len(own[0]) // self.size)
        memory_sum.reduce_scatter(self._shared, own, forest, share, name=name)
        return lambda: share

    def transport(self, parameters: Bucket, forest: Forest, *, in_order: bool) -> Transport:
        if not fit_in_memory(parameters):
            return super().transport(parameters, forest, in_order=in_order)
        return MemoryTransport(parameters, self._shared, forest)


class _HostsCommunicator(Communicator):
    kind = "hosts"

    def __init__(self, hosts: Hosts) -> None:
        super().__init__()
        self._hosts = hosts

    def hosts(self) -> Hosts:
        return self._hosts

    def transport(self, parameters: Bucket, forest: Forest, *, in_order: bool) -> Transport:
        if not fit_in_memory(parameters):
            return super().transport(parameters, forest, in_order=in_order)
        plan = (by_leaf if in_order else by_rank)(forest, self._hosts.memory.size)
        bucket_bytes = min(MOST_LEAVING_BYTES, BUNDLE_BYTES * self._hosts.memory.size)  # a rank sends its share at once
        return HierarchicalTransport(buckets_of(parameters, bucket_bytes), self._hosts, plan)


_chosen: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()
"""entries end with torch's process groups"""


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """The communicator of a group (default: all ranks). It uses torch.distributed if none was made."""
    known = group or dist.group.WORLD
    return (known and _chosen.get(known)) or Communicator(group)


def make_communicator(
    asked: Asked = "auto", group: dist.ProcessGroup | None = None, *, bulk_bytes: int = BULK_BYTES
) -> Communicator:
    """Make the communicator of a group: the default one, or one with all ranks in the same order.

    The first call is a collective. Later calls return its result. Rank 0 prints once why ranks do not share memory.

    Args:
        asked: "shared" fails if memory cannot be shared, "torch" does not try.
        group: if it has only some of the ranks, they use torch.distributed.
        bulk_bytes: the bytes that each rank hands over in one tick.

    Raises:
        UsageError: `asked` is "shared", and it is impossible; on rank 0, ReportedByPeer on the others.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1 or (group is not None and group.size() < world.size()):
        return communicator(group)
    if world not in _chosen:
        _chosen[world] = _made(world, asked, bulk_bytes)
    if group is not None:
        _chosen[group] = _chosen[world]
    return _chosen[world]


def memory_communicator(memory: SharedMemory) -> Communicator:
    """The communicator of the ranks that share `memory`."""
    return _MemoryCommunicator(memory)


def _made(group: dist.ProcessGroup, asked: Asked, bulk_bytes: int) -> Communicator:
    if not _talks_over_gloo(group):
        why = f"the ranks' backend is {dist.get_backend(group)}"
        if asked == "shared":
            raise _impossible(group, why)
        return Communicator()
    layout = MemoryLayout(group.size(), bulk_bytes)
    try:
        met = meet_in_memory(group.rank(), layout, wanted=asked != "torch")
    except Refusal as refusal:
        if asked == "shared":
            raise _impossible(group, str(refusal)) from None
        if not str(refusal).endswith(_QUIET):
            say(f"ranks talk over gloo, not through shared memory: {refusal}")
        return Communicator()
    several, place = met.hosts > 1, [peer.rank for peer in met.peers].index(group.rank())
    name, seconds = group_name(met.host) if several else GROUP, _timeout_seconds(group)
    memory = SharedMemory(met.peers, place, layout, seconds, group=name)
    # When the group or the process ends, ranks that wait for this rank get an error.
    weakref.finalize(group, memory.leave)
    if not several:
        return _MemoryCommunicator(memory)
    say(
        f"gradients are added up in shared memory on each of {met.hosts} hosts ({memory.size} ranks each), and over "
        "gloo between hosts",
    )
    return _HostsCommunicator(connect_hosts(memory, met.host, met.hosts))


def _talks_over_gloo(group: dist.ProcessGroup) -> bool:
    return "cpu:gloo" in str(dist.get_backend_config(group))  # of both, if the program names none


def say(text: str) -> None:
    """Print a notice on rank 0 of the default group."""
    if dist.group.WORLD is None or dist.group.WORLD.rank() == 0:
        print(f"paceline: {text}", file=sys.stderr, flush=True)


def _impossible(group: dist.ProcessGroup, why: str) -> UsageError | ReportedByPeer:
    if group.rank() != 0:
        return ReportedByPeer("rank 0 tells why memory cannot be shared", ExitCode.USAGE)
    switch = f", {SHARED_MEMORY}={os.environ[SHARED_MEMORY]}" if SHARED_MEMORY in os.environ else ""
    return UsageError(code="memory-not-shared", size=group.size(), reason=why, switch=switch)


def _timeout_seconds(group: dist.ProcessGroup) -> float:
    """The timeout of this group's collectives."""
    backend = group._get_backend(torch.device(CPU))  # pyright: ignore[reportPrivateUsage]
    return backend.options._timeout.total_seconds()
