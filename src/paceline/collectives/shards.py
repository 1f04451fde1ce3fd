"""Parameters and gradients in shards; each rank updates one (ZeRO stage 2).

A reduce-scatter gives each rank the sum of its shard of the gradients. The rank updates this shard, and an all-gather
distributes the updated shards (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models"). The result of an element-wise optimizer for an element does not depend on the other elements of the shard.

A bucket contains its parameters side by side, in the order of backward, and is split into N shards of equal size. Ranks
therefore exchange contiguous memory, hold the same number of elements for any sizes of parameters, and send the
gradients of a bucket when they are complete. With shards of 10 elements and 2 ranks:

    parameters   a (6 elements), b (12)
    bucket       a a a a a a b b b b | b b b b b b b b . .
    rank 0 updates a and the first 4 of b, rank 1 the other 8

Memory of each rank, for P parameters and Adam: P weights, P/N gradients, 2P/N state. The full gradients of a bucket are
freed when its sum has arrived. With one micro-batch for each rank, only a few buckets therefore have full gradients at
the same time. Several micro-batches accumulate full gradients first. examples/textbook/zero.py is a runnable short
version.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.collectives.buckets import BUCKET_BYTES, Bucket, divide, group_into_buckets, trainable_parameters
from paceline.collectives.communicator import get_communicator
from paceline.collectives.owners import LocalShard, ParameterOwners, replace_optimizer_parameters
from paceline.collectives.sum_tree import ALIGNMENT_ELEMENTS, Grads, LeafPartition, round_up
from paceline.collectives.torch_collectives import WaitFunction
from paceline.errors import UsageError


@dataclass(frozen=True)
class ParameterRange:
    """The elements [start, stop) of the bucket's parameter `index`, at element `at` of a rank's shard."""

    parameter_index: int
    start: int
    stop: int
    shard_offset: int


@dataclass(frozen=True)
class ShardedBucket:
    """Parameters side by side in `weights`, (N * shard_size,). The shard of rank r begins at r * shard_size."""

    parameters: Sequence[nn.Parameter]
    weights: Tensor
    shard_size: int
    ranges_by_rank: Sequence[Sequence[ParameterRange]]  # by rank


class ParameterShards:
    """A module's parameters in buckets, split into shards; `pieces` are those of this rank."""

    def __init__(
        self, module: nn.Module, rank: int, world_size: int, *, kinds: Mapping[nn.Parameter, int] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:  # fmt: skip
        """Move the data of every parameter that requires a gradient into a bucket.

        A bucket contains parameters with the same number in `kinds`. ValueError: two parameters are views of the same
        memory.
        """
        parameters = trainable_parameters(module)
        _check_no_views(parameters)
        self.module, self.rank, self.world_size = module, rank, world_size
        buckets = group_into_buckets(parameters, bucket_bytes, kinds)
        self.buckets = [_shard_bucket(bucket, world_size) for bucket in buckets]
        self._parameters = [p for bucket in self.buckets for p in bucket.parameters]
        self._data = [p.data for p in self._parameters]
        self._pointers = [p.data_ptr() for p in self._parameters]
        self.used: set[nn.Parameter] | None = None
        """The parameters that any rank has used in this step; None if no optimizer needs whole parameters."""
        self._zeroed: set[nn.Parameter] = set()  # before a step: their gradients are zeros, which it may leave
        self.pieces: dict[nn.Parameter, LocalShard] = {}
        for bucket in self.buckets:
            shard = bucket.weights.view(world_size, -1)[rank]
            for run in bucket.ranges_by_rank[rank]:
                parameter = bucket.parameters[run.parameter_index]
                elements = nn.Parameter(shard[run.shard_offset : run.shard_offset + run.stop - run.start])
                self.pieces[parameter] = LocalShard(run.start, run.stop, elements, parameter.shape)

    def shard_optimizer(self, optimizer: Optimizer, *, whole: bool = False) -> dict[str, LocalShard]:
        """Make an `optimizer` of the module's parameters update this rank's pieces instead, and then gather all shards.

        Its groups and their options stay, so that schedulers work as usual. With `whole` it updates whole parameters,
        each on one rank, which then sends the pieces. Returns what this rank updates, by the names of the parameters.
        """
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        named = {name: p for p, name in names.items() if p in trained and p.requires_grad}
        updated = {name: self.pieces[p] for name, p in named.items() if p in self.pieces}
        optimizer.register_step_pre_hook(self.copy_assigned_values)
        if whole and named:  # the parameters of a pipeline stage may all belong to other optimizers
            updated = self._owners(named, updated).attach_to(optimizer)
        replace_optimizer_parameters(optimizer, groups, {name: shard.parameter for name, shard in updated.items()})
        buckets = [number for number, bucket in enumerate(self.buckets) if trained.intersection(bucket.parameters)]
        optimizer.register_step_post_hook(partial(self.gather, buckets))
        return updated

    def _owners(self, named: Mapping[str, nn.Parameter], pieces: Mapping[str, LocalShard]) -> ParameterOwners:
        used = self.used = set[nn.Parameter]() if self.used is None else self.used
        ranges = [{n: held[p] for n, p in named.items() if p in held} for held in self.ranges_by_rank()]
        return ParameterOwners(
            named, ranges, pieces, self.rank, has_gradient=lambda name: named[name] in used, holds_values=True
        )

    def ranges_by_rank(self) -> list[dict[nn.Parameter, tuple[int, int]]]:
        """By rank, the elements [start, stop) of each of its pieces."""
        return [
            {
                b.parameters[run.parameter_index]: (run.start, run.stop)
                for b in self.buckets
                for run in b.ranges_by_rank[r]
            }
            for r in range(self.world_size)
        ]

    @torch.no_grad()
    def copy_assigned_values(self, *_: object) -> None:
        """Before an update: move values that the script has assigned (`p.data = ...`) into the bucket."""
        in_place = [*map(Tensor.data_ptr, self._parameters)] == self._pointers
        if in_place and all(map(Tensor.is_contiguous, self._parameters)):
            return
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        for parameter, data in zip(self._parameters, self._data, strict=True):
            if not parameter.is_set_to(data):
                check_assigned_tensor(names.get(parameter, "a parameter"), parameter, data)
                parameter.data = data.copy_(parameter.data.clone())

    def begin_step(self) -> None:
        self.drop_gradients(self._zeroed)
        self._zeroed = set()

    def drop_gradients(self, kept: Collection[nn.Parameter]) -> None:
        for parameter, piece in self.pieces.items():
            if parameter not in kept:
                piece.parameter.grad = None
        if self.used is not None:
            self.used.intersection_update(kept)
        self._zeroed.intersection_update(kept)

    def zero_gradients(self, kept: Collection[nn.Parameter]) -> None:
        for parameter, piece in self.pieces.items():
            if parameter not in kept and piece.parameter.grad is not None:
                piece.parameter.grad.zero_()
                self._zeroed.add(parameter)
        self._zeroed.update((self.used or set()).difference(kept))

    def gather(self, buckets: Sequence[int], *_: object) -> None:
        if self.world_size == 1:
            return
        works = [
            get_communicator().all_gather(
                bucket.weights, bucket.weights.view(self.world_size, -1)[self.rank], f"weights of bucket {index}",
                async_op=True,
            )
            for index in buckets
            for bucket in [self.buckets[index]]
        ]  # fmt: skip
        for work in works:
            if work is not None:
                work.wait()


def check_assigned_tensor(name: str, values: Tensor, data: Tensor) -> None:
    wanted, found = (f"{tuple(t.shape)}, {str(t.dtype).removeprefix('torch.')} on {t.device}" for t in (data, values))
    if wanted != found:
        raise UsageError(code="assigned-data-differs", name=name, found=found, wanted=wanted)


def _check_no_views(parameters: Iterable[nn.Parameter]) -> None:
    pointers: set[int] = set()
    for parameter in parameters:
        pointer = parameter.untyped_storage().data_ptr()
        if pointer in pointers and parameter.numel():
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} shares its memory with a different parameter, and "
                "shards would separate them. Use one parameter, or a different strategy."
            )
        pointers.add(pointer)


@torch.no_grad()
def _shard_bucket(parameters: Sequence[nn.Parameter], world_size: int) -> ShardedBucket:
    lengths = [round_up(p.numel(), ALIGNMENT_ELEMENTS) for p in parameters]
    size = round_up(sum(lengths), ALIGNMENT_ELEMENTS * world_size) // world_size
    weights = parameters[0].new_zeros(size * world_size)
    runs: list[list[ParameterRange]] = [[] for _ in range(world_size)]
    at = 0
    for index, (parameter, length) in enumerate(zip(parameters, lengths, strict=True)):
        end = at + parameter.numel()
        parameter.data = weights[at:end].view(parameter.shape).copy_(parameter)
        for rank in range(at // size if size else 0, -(-end // size) if size else 0):
            low, high = max(at, rank * size), min(end, (rank + 1) * size)
            if low < high:
                runs[rank].append(ParameterRange(index, low - at, high - at, low - rank * size))
        at += length
    return ShardedBucket(parameters, weights, size, runs)


MAX_PENDING_BUCKETS = 2  # one is sent while the next one fills


class ShardBucketReducer:
    """A transport that sets the gradient of each piece of `shards`, to None if no rank has used the parameter."""

    overlaps_backward = True

    def __init__(self, shards: ParameterShards, partition: LeafPartition) -> None:
        self.buckets: Sequence[Bucket] = [bucket.parameters for bucket in shards.buckets]
        self._shards, self._partition = shards, partition
        self.discard_sums()

    def start_bucket(self, number: int, partials: list[Grads | None]) -> None:
        bucket = self._shards.buckets[number]
        packed = [_packed(bucket, grads, self._shards.world_size) for grads in partials]
        numbers = range(len(bucket.parameters))
        self._used.append([any(grads and grads[i] is not None for grads in partials) for i in numbers])
        partials.clear()  # they are copied: free them before the gradients of other ranks arrive
        self._pending.append(get_communicator().start_reduce_scatter(self._partition, packed, f"bucket {number}"))
        while len(self._pending) > MAX_PENDING_BUCKETS:
            self._end_first()

    def finish_buckets(self, divisor: float | Tensor | None) -> bool:
        while self._pending:
            self._end_first()
        if divisor is not None:
            shards = [*zip(self._shards.buckets, self._arrived, self._used, strict=True)]
            # Read the flags only if this rank did not use all parameters: on a GPU the host would wait.
            parts = [shard[bucket.shard_size :] for bucket, shard, used in shards if not all(used)]
            flags: list[float] = torch.cat(parts).tolist() if parts else []
            for bucket, shard, used in shards:
                size = 0 if all(used) else len(shard) - bucket.shard_size
                self._assign_grads(bucket, divide(shard[: bucket.shard_size], divisor), flags[:size] or used)
                del flags[:size]
        self.discard_sums()
        return False

    def discard_sums(self) -> None:
        self._pending = deque[WaitFunction]()
        self._arrived: list[Tensor] = []
        self._used: list[Sequence[float]] = []

    def _end_first(self) -> None:
        self._arrived.append(self._pending.popleft()())

    def _assign_grads(self, bucket: ShardedBucket, sums: Tensor, used: Sequence[float]) -> None:
        if self._shards.used is not None:
            self._shards.used.update(compress(bucket.parameters, used))
        for run in bucket.ranges_by_rank[self._shards.rank]:
            if used[run.parameter_index]:
                piece = self._shards.pieces[bucket.parameters[run.parameter_index]]
                piece.parameter.grad = sums[run.shard_offset : run.shard_offset + run.stop - run.start]


def _packed(bucket: ShardedBucket, grads: Grads | None, world_size: int) -> Tensor:
    """(N * (shard_size + flags),): for each rank, its shard of the gradients, and the same flags: 1 for a gradient.

    A rank must know which of its pieces no rank has used. A separate message would cost a round trip.
    """
    parameters = bucket.parameters
    flat = [None] * len(parameters) if grads is None else [None if g is None else g.reshape(-1) for g in grads]
    packed = parameters[0].new_zeros(world_size, bucket.shard_size + round_up(len(parameters), ALIGNMENT_ELEMENTS))
    targets, sources = list[Tensor](), list[Tensor]()
    for row, runs in zip(packed, bucket.ranges_by_rank, strict=True):
        for run in runs:
            if (gradient := flat[run.parameter_index]) is not None:
                targets.append(row[run.shard_offset : run.shard_offset + run.stop - run.start])
                sources.append(gradient[run.start : run.stop])
    if targets:
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    packed[:, bucket.shard_size : bucket.shard_size + len(flat)].fill_(1)
    for index, gradient in enumerate(flat):
        if gradient is None:
            packed[:, bucket.shard_size + index] = 0
    return packed.flatten()
