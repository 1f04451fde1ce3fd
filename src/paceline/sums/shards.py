"""A module's parameters laid into buckets and cut into equal shares, each updated by one rank.

Each rank is given the sum of its share of the gradients (`shares`), updates that share, and an all-gather brings the
updated shares together (ZeRO stage 2: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models"). The update of an element-wise optimizer does not depend on who else is updated beside it, so the
result has the very same bits.

Parameters are laid side by side in buckets, those that backward reaches first in the first one, and each bucket is cut
into N equal shares: so what is exchanged are whole pieces of memory, every rank has the same amount whatever the sizes
of the parameters, and a bucket's gradients leave as soon as they are there. With 10 elements a cut, 2 ranks:

    parameters   a (6 elements), b (12)
    bucket       a a a a a a b b b b | b b b b b b b b . .
    rank 0 updates a and the first 4 of b, rank 1 the other 8

Memory of each rank, for P parameters and Adam: P weights, P/N gradients, 2P/N state.
examples/textbook/zero.py is the same on one page, to be run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.sums.buckets import BUCKET_BYTES, buckets_of, trainable
from paceline.sums.ranks import ranks
from paceline.sums.tree import ALIGNED, round_up


@dataclass(frozen=True)
class Piece:
    """This rank's run of a parameter's elements, [start, stop) of it flattened, as a parameter of its own."""

    start: int
    stop: int
    parameter: nn.Parameter


@dataclass(frozen=True)
class Placed:
    """The elements [start, stop) of the bucket's parameter `index` lie from element `at` of a rank's share on."""

    index: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class CutBucket:
    """Parameters side by side in `weights`, (N * share,), rank r's share from element r * share on."""

    parameters: Sequence[nn.Parameter]
    weights: Tensor
    share: int
    runs: Sequence[Sequence[Placed]]
    """by rank"""


class Shards:
    """A module's parameters, laid into buckets and cut into shares: `pieces` are those of this rank."""

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
            ValueError: if two parameters are views of one memory, which would be torn apart.
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
                elements = nn.Parameter(own[run.at : run.at + run.stop - run.start])
                self.pieces[bucket.parameters[run.index]] = Piece(run.start, run.stop, elements)

    def shard(self, optimizer: Optimizer) -> None:
        """Let `optimizer`, made for the module's parameters, update this rank's pieces instead, and then gather.

        Its groups and all their options stay, so schedulers work as ever.
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
        """Before an update: move values that `p.data = ...` or `p.set_(...)` has put elsewhere into the shared memory.

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
        """Let the pieces' gradients go."""
        for piece in self.pieces.values():
            piece.parameter.grad = None

    def gather(self, *_: object) -> None:
        """Bring all ranks' updated shares together (a collective)."""
        if self.world_size == 1:
            return
        works = [
            ranks().all_gather(
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
    wanted, found = ((tuple(t.shape), str(t.dtype).removeprefix("torch."), str(t.device)) for t in (place, values))
    if wanted != found:
        raise UsageError(
            f"the parameter {name} was given other data (p.data = ... or p.set_(...)): {found[0]}, {found[1]} on "
            f"{found[2]}, in place of {wanted[0]}, {wanted[1]} on {wanted[2]}. This strategy cuts parameters when "
            "it is applied, so they must keep their shape, type and device. Change the model before that"
        )


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
def _laid(parameters: Sequence[nn.Parameter], world_size: int) -> CutBucket:
    lengths = [round_up(p.numel(), ALIGNED) for p in parameters]
    share = round_up(sum(lengths), ALIGNED * world_size) // world_size
    weights = parameters[0].new_zeros(share * world_size)
    runs: list[list[Placed]] = [[] for _ in range(world_size)]
    at = 0
    for index, (parameter, length) in enumerate(zip(parameters, lengths, strict=True)):
        end = at + parameter.numel()
        place = weights[at:end].view(parameter.shape)
        parameter.data = place.copy_(parameter)
        for rank in range(at // share if share else 0, -(-end // share) if share else 0):
            low, high = max(at, rank * share), min(end, (rank + 1) * share)
            if low < high:
                runs[rank].append(Placed(index, low - at, high - at, low - rank * share))
        at += length
    return CutBucket(parameters, weights, share, runs)
