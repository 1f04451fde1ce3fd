"""Communicators exchange tensors and messages between the ranks of a process group. All ranks choose the kind once.

    all ranks on one host                                      "shared"   memory
    several hosts with the same number of ranks (2 or more)    "hosts"    gradients: memory and, between hosts, gloo
    otherwise                                                  "torch"    torch.distributed

    make_communicator()                       # a collective, at its first call
    communicator().start_sum(numbers, "name")()

torch.distributed always sends tensors on other devices than the CPU, and all tensors before the choice.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives import memory as handshake
from paceline.collectives import memory_sum
from paceline.collectives.buckets import BUCKET_BYTES, buckets_of
from paceline.collectives.hosts import Hosts, by_leaf, by_rank, connect_hosts, group_name, hosts_of_one
from paceline.collectives.memory import BULK_BYTES, GROUP, MemoryLayout, Refusal, SharedMemory, meet_in_memory
from paceline.collectives.torch_collectives import (
    CPU,
    AllToAll,
    gather_over_torch,
    gather_shares,
    labelled,
    start_gather,
    start_sum,
)
from paceline.collectives.transports import (
    Bucket,
    HierarchicalTransport,
    MemoryTransport,
    TorchTransport,
    Transport,
    fit_in_memory,
    leaving_bytes,
)
from paceline.collectives.tree import Forest
from paceline.errors import ExitCode, ToldElsewhere, UsageError
from paceline.protocol.control import SHARED_MEMORY

Asked = Literal["auto", "shared", "torch"]
_QUIET = ("switched off", "hosts")  # reasons that are not printed


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
        return HierarchicalTransport(buckets_of(parameters, leaving_bytes(self._hosts)), self._hosts, plan)


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
        UsageError: `asked` is "shared", and it is impossible; on rank 0, ToldElsewhere on the others.
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


def _impossible(group: dist.ProcessGroup, why: str) -> UsageError | ToldElsewhere:
    if group.rank() != 0:
        return ToldElsewhere("rank 0 tells why memory cannot be shared", ExitCode.USAGE)
    switch = f", {SHARED_MEMORY}={os.environ[SHARED_MEMORY]}" if SHARED_MEMORY in os.environ else ""
    return UsageError(code="memory-not-shared", size=group.size(), reason=why, switch=switch)


def _timeout_seconds(group: dist.ProcessGroup) -> float:
    """The timeout of this group's collectives."""
    backend = group._get_backend(torch.device(CPU))  # pyright: ignore[reportPrivateUsage]
    return backend.options._timeout.total_seconds()
