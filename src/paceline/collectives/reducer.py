"""Sums gradients over virtual ranks, the leaves of one tree, in buckets that are sent during backward.

autograd would add virtual ranks from left to right. The reducer therefore removes the gradients of a virtual rank
before the backward of the next one, and adds them as a leaf of the tree (see `tree`). Several backwards of one virtual
rank accumulate, because they run on the same rank. In this rank's last backward of a step, a bucket is sent when its
last gradient is complete, in the same order on all ranks. A transport sums the buckets over ranks (see
`torch_communicator.BucketReducer`).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.collectives.buckets import grad_of, sparse_gradient_error, trainable_parameters
from paceline.collectives.communicator import make_communicator
from paceline.collectives.hosts import NodeTopology
from paceline.collectives.inter_node import InterNodeAllReduce, TwoLevelBucketReducer
from paceline.collectives.shards import ParameterShards, ShardBucketReducer
from paceline.collectives.shm_communicator import SharedMemoryBucketReducer
from paceline.collectives.sum_tree import Grads, LeafPartition, add_gradient_lists
from paceline.collectives.torch_collectives import Group
from paceline.collectives.torch_communicator import BucketReducer
from paceline.errors import UsageError


class Reducer:
    """Sums gradients over all leaves.

        reducer = make_reducer(model, LeafPartition([(0, 2), (2, 3)], rank), in_order=True)
        for virtual_rank in my_virtual_ranks:
            reducer.begin_backward(virtual_rank, is_last=virtual_rank == my_virtual_ranks[-1])
            loss(...).backward()
            reducer.end_backward()
        reducer.finish(divisor)                  # .grad is the sum over all virtual ranks, divided

    A rank that does not use a parameter contributes zeros, because all ranks must join every collective. If no rank
    uses it, .grad stays None. An optimizer skips None, but with zeros it would decay the weight (AdamW) or move it by
    old momentum. Every step ends with `finish`, or after an error with `reset`, on every rank.
    """

    def __init__(
        self, partition: LeafPartition, transport: BucketReducer, *, at_start: Callable[[], None] | None = None,
        module: nn.Module | None = None, single_leaf: int | None = None,
    ) -> None:  # fmt: skip
        """Register hooks on the parameters of `module`, whose names errors have. `at_start` is called before a step.

        `single_leaf`: the only leaf of this rank. All its backwards add to it, including those of dummy batches: a rank
        without samples contributes zeros. None: each backward adds to the leaf of its virtual rank.
        """
        self._buckets, self._partition, self._transport = transport.buckets, partition, transport
        self._at_start = at_start
        self._parameters = [parameter for bucket in self._buckets for parameter in bucket]
        # by id: a tensor computes its hash in Python
        self._bucket_of = {id(p): index for index, bucket in enumerate(self._buckets) for p in bucket}
        self._names, self._tied = _named(module)
        self._numels = [[p.numel() for p in bucket] for bucket in self._buckets]
        self._single_leaf, self._put_aside = single_leaf, list[tuple[nn.Parameter, Tensor | None]]()
        # A tied parameter may get its gradient in several parts. None stays in the set: the bucket is sent last.
        self._awaited = [{*map(id, b), *([None] if self._tied.intersection(b) else [])} for b in self._buckets]
        self._sums = [partition.make_partial_sums(add_gradient_lists) for _ in self._buckets]
        self._forget()
        for parameter in self._parameters if transport.overlaps_backward else ():
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def begin_backward(self, virtual_rank: int, *, is_last: bool, counted: bool = True) -> None:
        """Begin one backward of a virtual rank, not below that of the previous backward.

        With `is_last`, this rank's last backward of the step, buckets are sent as they fill. The gradients of a dummy
        batch, not `counted`, are discarded.
        """
        if self._at_start is not None and self._leaf is None and self._sent == 0:
            self._at_start()
        if self._single_leaf is not None:
            virtual_rank, counted = self._single_leaf, True
        if not counted:
            self._put_aside = [(parameter, parameter.grad) for parameter in self._parameters]
            for parameter, _ in self._put_aside:
                parameter.grad = None
            return
        if self._leaf not in (None, virtual_rank):
            # the gradients of the previous virtual rank become a leaf of each bucket that has not been sent
            with torch.no_grad():
                for index in range(self._sent, len(self._buckets)):
                    self._add_leaf(index)
        self._leaf, self._leaving = virtual_rank, is_last

    def end_backward(self, *, failed: bool = False) -> None:
        if self._put_aside:
            for parameter, grad in self._put_aside if not failed else ():
                parameter.grad = grad
            self._put_aside = []
        elif not failed:
            self._leaving = False
        elif self._sent == 0:  # no rank waits for this step
            self._forget()

    def finish(self, divisor: float | Tensor | None) -> bool:
        """Set every .grad to the sum over all leaves, divided by `divisor` (a collective, under `torch.no_grad()`).

        `divisor` is the same on every rank, and on the gradients' device if it is a tensor. None: .grad does not
        change. Returns True if all gradients are finite, False if that is unknown; the same on all ranks.
        """
        try:
            while self._sent < len(self._buckets):  # also buckets without a gradient
                self._send_next()
            return self._transport.finish_buckets(divisor)
        except BaseException:
            self._transport.discard_sums()
            raise
        finally:
            self._forget()

    @torch.no_grad()
    def reset(self) -> None:
        """Make the reducer usable again after an error in forward or backward; .grad does not change.

        This rank sends the remaining buckets. Other ranks may wait for them in `finish`, and messages of the next step
        must not match those of this step.
        """
        self.finish(None)

    def _forget(self) -> None:
        self._leaf: int | None = None
        self._leaving = False
        for sums in self._sums if self._single_leaf is None else ():
            sums.clear()
        self._sent, self._missing = 0, [*map(set.copy, self._awaited)]

    def _on_gradient(self, parameter: Tensor) -> None:
        bucket = self._bucket_of[id(parameter)]
        if bucket < self._sent:
            name = next((name for other, name in self._names.items() if other is parameter), "a parameter")
            raise UsageError(code="gradient-after-send", name=name)
        if not self._leaving:
            return
        self._missing[bucket].discard(id(parameter))
        while self._sent < len(self._buckets) and not self._missing[self._sent]:
            with torch.no_grad():
                self._send_next()

    def _add_leaf(self, index: int) -> None:
        if (grads := self._take_gradients(index)) is not None:
            # gradients from outside any `leaf` belong to the first leaf of this rank
            leaf = self._partition.ranges[self._partition.rank][0] if self._leaf is None else self._leaf
            self._sums[index].add(leaf, grads)

    def _take_gradients(self, index: int) -> Grads | None:
        parameters = self._buckets[index]
        grads: Grads = [*map(grad_of, parameters)]
        if not check_gradients(parameters, grads, self._numels[index], self._names):
            return None
        for parameter in parameters:  # not copied: they now belong to the sum
            parameter.grad = None
        return grads

    def _send_next(self) -> None:
        index = self._sent
        self._sent += 1
        if self._single_leaf is None:
            self._add_leaf(index)
        partials = self._sums[index].finish() if self._single_leaf is None else [self._take_gradients(index)]
        self._transport.start_bucket(index, partials)


def check_gradients(
    parameters: Sequence[nn.Parameter], grads: Grads, numels: Sequence[int], names: Mapping[nn.Parameter, str]
) -> bool:
    """Whether any has a gradient. Raises UsageError for a sparse one, or one whose size differs from `numels`."""
    is_any = False
    for parameter, grad, numel in zip(parameters, grads, numels, strict=True):
        if grad is None:
            continue
        is_any = True
        if grad.layout is not torch.strided:
            name = names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")
            raise sparse_gradient_error(f"the gradient of {name} has the layout {grad.layout}")
        if grad.numel() != numel:
            name = names.get(parameter, "a parameter")
            raise UsageError(code="parameter-shape-changed", name=name, before=numel, now=parameter.numel())
    return is_any


def make_reducer(module: nn.Module, partition: LeafPartition, group: Group = None, *, in_order: bool) -> Reducer:
    """A reducer over the leaves of `partition` (a collective). `group`: default: all ranks.

    `in_order` of the tree, it gives the bits of one process. Otherwise each rank has one leaf, and the order is the
    cheapest one.
    """
    parameters, single_leaf = trainable_parameters(module), None if in_order else partition.ranges[partition.rank][0]
    if len(partition.ranges) == 1:
        transport: BucketReducer = SharedMemoryBucketReducer(parameters, None, partition)
    else:
        transport = make_communicator(group=group).make_bucket_reducer(parameters, partition, in_order=in_order)
    return Reducer(partition, transport, module=module, single_leaf=single_leaf)


def make_node_reducer(module: nn.Module, hosts: NodeTopology, across: InterNodeAllReduce | None = None) -> Reducer:
    """A reducer over the ranks of each host, and if there is `across`, over hosts (a collective)."""
    rank = hosts.memory.rank
    transport = TwoLevelBucketReducer(trainable_parameters(module), hosts, across)
    return Reducer(LeafPartition.one_leaf_per_rank(hosts.memory.size, rank), transport, module=module, single_leaf=rank)


def make_shard_reducer(shards: ParameterShards, partition: LeafPartition) -> Reducer:
    """A reducer that sums in the order of the tree, and sets the gradient of each piece of this rank."""
    return Reducer(partition, ShardBucketReducer(shards, partition), at_start=shards.begin_step, module=shards.module)


def _named(module: nn.Module | None) -> tuple[dict[nn.Parameter, str], set[nn.Parameter]]:
    names: dict[nn.Parameter, str] = {}
    tied: set[nn.Parameter] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False) if module is not None else ():
        if names.setdefault(parameter, name) != name:
            tied.add(parameter)
    return names, tied
