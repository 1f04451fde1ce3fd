"""Parameters and gradients in shares, of which each rank updates one (ZeRO stage 2).

A reduce-scatter gives each rank the sum of its share of the gradients. The rank updates this share, and an all-gather
distributes the updated shares (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models"). An element-wise optimizer computes the same bits for an element, whatever else it updates.

Parameters lie side by side in buckets, in the order of backward, and each bucket is split into N equal shares. Ranks
therefore exchange contiguous memory, hold the same amount whatever the sizes of the parameters, and send a bucket's
gradients when they are complete. With shares of 10 elements and 2 ranks:

    parameters   a (6 elements), b (12)
    bucket       a a a a a a b b b b | b b b b b b b b . .
    rank 0 updates a and the first 4 of b, rank 1 the other 8

Memory of each rank, for P parameters and Adam: P weights, P/N gradients, 2P/N state. The gradients of a bucket are
freed when it has arrived: with one micro-batch for each rank, only a few buckets of whole gradients exist at a time.
Several micro-batches add up whole gradients first. examples/textbook/zero.py is a runnable short version.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.collectives.buckets import BUCKET_BYTES, buckets_of, divide, trainable
from paceline.collectives.communicator import Bucket, communicator
from paceline.collectives.tree import ALIGNED, Grads, LeafPartition, round_up
from paceline.errors import UsageError


@dataclass(frozen=True)
class Piece:
    """This rank's elements [start, stop) of a parameter, flattened, as a separate parameter."""

    start: int
    stop: int
    parameter: nn.Parameter
    whole: torch.Size
    """the shape of the whole parameter"""


@dataclass(frozen=True)
class ShareRun:
    """The elements [start, stop) of the bucket's parameter `index`, at element `at` of a rank's share."""

    index: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class ShardedBucket:
    """Parameters side by side in `weights`, (N * share,); the share of rank r begins at element r * share."""

    parameters: Sequence[nn.Parameter]
    weights: Tensor
    share: int
    runs: Sequence[Sequence[ShareRun]]
    """by rank"""


class Shards:
    """A module's parameters in buckets, split into shares; `pieces` are those of this rank."""

    def __init__(
        self,
        module: nn.Module,
        rank: int,
        world_size: int,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Move the data of every parameter that requires a gradient; the parameters stay the same objects.

        Args:
            module: the same on every rank.
            rank: of this process.
            world_size: N.
            bucket_bytes: of each bucket.

        Raises:
            ValueError: if two parameters are views of the same memory.
        """
        parameters = trainable(module)
        _refuse_views(parameters)
        self.module, self.rank, self.world_size = module, rank, world_size
        self.buckets = [_laid(bucket, world_size) for bucket in buckets_of(parameters, bucket_bytes)]
        self._parameters = [p for bucket in self.buckets for p in bucket.parameters]
        self._places = [p.data for p in self._parameters]
        self._pointers = [p.data_ptr() for p in self._parameters]
        self.pieces: dict[nn.Parameter, Piece] = {}
        for bucket in self.buckets:
            own = bucket.weights.view(world_size, -1)[rank]
            for run in bucket.runs[rank]:
                parameter = bucket.parameters[run.index]
                elements = nn.Parameter(own[run.at : run.at + run.stop - run.start])
                self.pieces[parameter] = Piece(run.start, run.stop, elements, parameter.shape)

    def shard(self, optimizer: Optimizer) -> None:
        """Let `optimizer`, made for the module's parameters, update this rank's pieces instead, and then gather.

        Its groups and their options stay, so that schedulers work as usual.
        """
        for group in optimizer.param_groups:
            group["params"] = [self.pieces[p].parameter for p in group["params"] if p in self.pieces]
        optimizer.register_step_pre_hook(self.take_assigned)
        optimizer.register_step_post_hook(self.gather)

    def shares(self, parameters: Sequence[nn.Parameter]) -> list[list[tuple[int, int, int]]]:
        """By rank: (position in `parameters`, start, stop) of each of its pieces."""
        position = {parameter: index for index, parameter in enumerate(parameters)}
        return [
            [(position[b.parameters[run.index]], run.start, run.stop) for b in self.buckets for run in b.runs[rank]]
            for rank in range(self.world_size)
        ]

    @torch.no_grad()
    def take_assigned(self, *_: object) -> None:
        """Before an update: move values that `p.data = ...` or `p.set_(...)` has put elsewhere into the bucket.

        Raises:
            UsageError: if they have another shape, type or device.
        """
        if [*map(Tensor.data_ptr, self._parameters)] == self._pointers and all(
            map(Tensor.is_contiguous, self._parameters)
        ):
            return
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        for parameter, place in zip(self._parameters, self._places, strict=True):
            if not parameter.is_set_to(place):
                check_assigned(names.get(parameter, "a parameter"), parameter, place)
                parameter.data = place.copy_(parameter.data.clone())

    def drop_gradients(self) -> None:
        """Free the pieces' gradients."""
        for piece in self.pieces.values():
            piece.parameter.grad = None

    def gather(self, *_: object) -> None:
        """All-gather the updated shares (a collective)."""
        if self.world_size == 1:
            return
        works = [
            communicator().all_gather(
                bucket.weights, bucket.weights.view(self.world_size, -1)[self.rank], f"weights of bucket {index}",
                async_op=True,
            )
            for index, bucket in enumerate(self.buckets)
        ]  # fmt: skip
        for work in works:
            if work is not None:
                work.wait()


def check_assigned(name: str, values: Tensor, place: Tensor) -> None:
    """Raise UsageError if `values`, assigned to parameter `name`, do not fit in its memory."""
    wanted, found = (f"{tuple(t.shape)}, {str(t.dtype).removeprefix('torch.')} on {t.device}" for t in (place, values))
    if wanted != found:
        raise UsageError(code="assigned-data-differs", name=name, found=found, wanted=wanted)


def _refuse_views(parameters: Iterable[nn.Parameter]) -> None:
    places: set[int] = set()
    for parameter in parameters:
        place = parameter.untyped_storage().data_ptr()
        if place in places and parameter.numel():
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} shares its memory with another one: laid side by "
                "side, they would be two. Use one parameter, or another strategy."
            )
        places.add(place)


@torch.no_grad()
def _laid(parameters: Sequence[nn.Parameter], world_size: int) -> ShardedBucket:
    lengths = [round_up(p.numel(), ALIGNED) for p in parameters]
    share = round_up(sum(lengths), ALIGNED * world_size) // world_size
    weights = parameters[0].new_zeros(share * world_size)
    runs: list[list[ShareRun]] = [[] for _ in range(world_size)]
    at = 0
    for index, (parameter, length) in enumerate(zip(parameters, lengths, strict=True)):
        end = at + parameter.numel()
        place = weights[at:end].view(parameter.shape)
        parameter.data = place.copy_(parameter)
        for rank in range(at // share if share else 0, -(-end // share) if share else 0):
            low, high = max(at, rank * share), min(end, (rank + 1) * share)
            if low < high:
                runs[rank].append(ShareRun(index, low - at, high - at, low - rank * share))
        at += length
    return ShardedBucket(parameters, weights, share, runs)


MOST_UNDER_WAY = 2  # buckets: one is sent while the next one fills


class ShardTransport:
    """A transport that gives each piece of `shards` its gradient, or None if no rank has used its parameter."""

    early = True

    def __init__(self, shards: Shards, partition: LeafPartition) -> None:
        self.buckets: Sequence[Bucket] = [bucket.parameters for bucket in shards.buckets]
        self._shards, self._partition = shards, partition
        self.forget()

    def begin(self, number: int, partials: list[Grads | None]) -> None:
        """See communicator.Transport."""
        bucket = self._shards.buckets[number]
        packed = [_packed(bucket, grads, self._shards.world_size) for grads in partials]
        self._used.append(
            [any(grads and grads[i] is not None for grads in partials) for i in range(len(bucket.parameters))]
        )
        partials.clear()  # they are copied: free them before those of other ranks arrive
        self._under_way.append(communicator().start_reduce_scatter(self._partition, packed, f"bucket {number}"))
        while len(self._under_way) > MOST_UNDER_WAY:
            self._end_first()

    def end(self, divisor: float | Tensor | None) -> bool:
        """See communicator.Transport."""
        while self._under_way:
            self._end_first()
        if divisor is not None:
            shares = [*zip(self._shards.buckets, self._arrived, self._used, strict=True)]
            # Read only if this rank did not use all of them: on a GPU, reading means waiting.
            parts = [share[bucket.share :] for bucket, share, used in shares if not all(used)]
            flags: list[float] = torch.cat(parts).tolist() if parts else []
            for bucket, share, used in shares:
                size = 0 if all(used) else len(share) - bucket.share
                self._hand_out(bucket, divide(share[: bucket.share], divisor), flags[:size] or used)
                del flags[:size]
        return False

    def forget(self) -> None:
        """See communicator.Transport."""
        self._under_way = deque[Callable[[], Tensor]]()
        self._arrived: list[Tensor] = []
        self._used: list[Sequence[float]] = []

    def _end_first(self) -> None:
        self._arrived.append(self._under_way.popleft()())

    def _hand_out(self, bucket: ShardedBucket, sums: Tensor, used: Sequence[float]) -> None:
        for run in bucket.runs[self._shards.rank]:
            if used[run.index]:
                piece = self._shards.pieces[bucket.parameters[run.index]]
                piece.parameter.grad = sums[run.at : run.at + run.stop - run.start]


def _packed(bucket: ShardedBucket, grads: Grads | None, world_size: int) -> Tensor:
    """(n * (share + flags),): for each rank its share of the gradients, and a flag for each parameter with a gradient.

    A rank must know which of its pieces no rank has used; a separate message would cost a round trip.
    """
    parameters = bucket.parameters
    flat = [None] * len(parameters) if grads is None else [None if g is None else g.reshape(-1) for g in grads]
    packed = parameters[0].new_zeros(world_size, bucket.share + round_up(len(parameters), ALIGNED))
    places, pieces = list[Tensor](), list[Tensor]()
    for row, runs in zip(packed, bucket.runs, strict=True):
        for run in runs:
            if (gradient := flat[run.index]) is not None:
                places.append(row[run.at : run.at + run.stop - run.start])
                pieces.append(gradient[run.start : run.stop])
    if places:
        torch._foreach_copy_(places, pieces)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    packed[:, bucket.share : bucket.share + len(flat)] = 1
    for index, gradient in enumerate(flat):
        if gradient is None:
            packed[:, bucket.share + index] = 0
    return packed.flatten()
