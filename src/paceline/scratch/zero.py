"""How can N ranks train with an N-th of the gradients' and of the optimizer's memory each?

Adam keeps two numbers for every parameter, the same ones on every rank, and every rank holds every gradient. Here each
rank keeps them for its share only: it is given the sum of its share of the gradients (`scatter`), updates that share,
and an all-gather brings the updated shares together (ZeRO stage 2: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models"). The update of an element-wise optimizer does not depend on who else is
updated beside it, so the result has the very same bits.

Parameters are laid side by side in buckets, those that backward reaches first in the first one, and each bucket is cut
into N equal shares: so what is exchanged are whole pieces of memory, every rank has the same amount whatever the sizes
of the parameters, and a bucket's gradients leave as soon as they are there. With 10 elements a cut, 2 ranks:

    parameters   a (6 elements), b (12)
    bucket       a a a a a a b b b b | b b b b b b b b . .
    rank 0 updates a and the first 4 of b, rank 1 the other 8

Memory of each rank, for P parameters and Adam: P weights, P/N gradients, 2P/N state.
Run me: `torchrun --nproc-per-node 2 -m paceline.scratch.zero`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.scratch.reduce import buckets_of, named
from paceline.scratch.tree import gather_shares

ALIGNED = 64  # elements: pieces begin where a vector does, so an element meets the same instruction in any share


class Gathering(Protocol):
    """Shares on their way to all ranks."""

    def wait(self) -> object:
        """Return when all are there."""
        ...


Gather = Callable[[Tensor, Tensor, "dist.ProcessGroup | None"], Gathering]
"""(whole, this rank's share of it, group): starts to bring all ranks' shares together in the whole."""


@dataclass(frozen=True)
class Piece:
    """This rank's run of a parameter's elements, [start, stop) of it flattened, as a parameter of its own."""

    start: int
    stop: int
    parameter: nn.Parameter


@dataclass(frozen=True)
class Run:
    """The elements [start, stop) of the bucket's parameter `index` lie from element `at` of a rank's share on."""

    index: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Bucket:
    """Parameters side by side in `weights`, (N * share,), rank r's share from element r * share on."""

    parameters: Sequence[nn.Parameter]
    weights: Tensor
    share: int
    runs: Sequence[Sequence[Run]]
    """by rank"""


class Shards:
    """A module's parameters, laid into buckets and cut into shares: `pieces` are those of this rank."""

    def __init__(
        self,
        module: nn.Module,
        rank: int,
        world_size: int,
        *,
        bucket_bytes: int = 25 << 20,
        group: dist.ProcessGroup | None = None,
        gather: Gather = gather_shares,
    ) -> None:
        """Move the data of every parameter that requires a gradient; the parameters stay the same objects.

        Raises:
            ValueError: if two parameters are views of one memory, which would be torn apart.
        """
        parameters = [p for p in module.parameters() if p.requires_grad]
        _refuse_views(parameters)
        self.rank, self.world_size = rank, world_size
        self.buckets = [_laid(bucket, world_size) for bucket in buckets_of(parameters, bucket_bytes)]
        self.pieces: dict[nn.Parameter, Piece] = {}
        for bucket in self.buckets:
            own = bucket.weights.view(world_size, -1)[rank]
            for run in bucket.runs[rank]:
                elements = nn.Parameter(own[run.at : run.at + run.stop - run.start])
                self.pieces[bucket.parameters[run.index]] = Piece(run.start, run.stop, elements)
        self._group, self._gather = group, gather

    def shard(self, optimizer: Optimizer) -> None:
        """Let `optimizer`, made for the module's parameters, update this rank's pieces instead, and then gather.

        Its groups and all their options stay, so schedulers work as ever.
        """
        for group in optimizer.param_groups:
            group["params"] = [self.pieces[p].parameter for p in group["params"] if p in self.pieces]
        optimizer.register_step_post_hook(self.gather)

    def shares(self, parameters: Sequence[nn.Parameter]) -> list[list[tuple[int, int, int]]]:
        """By rank: (position in `parameters`, start, stop) of each of its pieces."""
        position = {parameter: index for index, parameter in enumerate(parameters)}
        return [
            [(position[b.parameters[run.index]], run.start, run.stop) for b in self.buckets for run in b.runs[rank]]
            for rank in range(self.world_size)
        ]

    def gather(self, *_: object) -> None:
        """Bring all ranks' updated shares together (a collective)."""
        if self.world_size == 1:
            return
        shares = [bucket.weights.view(self.world_size, -1)[self.rank] for bucket in self.buckets]
        works = [
            self._gather(bucket.weights, named(own, f"weights of bucket {index}"), self._group)
            for index, (bucket, own) in enumerate(zip(self.buckets, shares, strict=True))
        ]
        for work in works:
            work.wait()


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
def _laid(parameters: Sequence[nn.Parameter], world_size: int) -> Bucket:
    lengths = [round_up(p.numel(), ALIGNED) for p in parameters]
    share = round_up(sum(lengths), ALIGNED * world_size) // world_size
    weights = parameters[0].new_zeros(share * world_size)
    runs: list[list[Run]] = [[] for _ in range(world_size)]
    at = 0
    for index, (parameter, length) in enumerate(zip(parameters, lengths, strict=True)):
        end = at + parameter.numel()
        place = weights[at:end].view(parameter.shape)
        parameter.data = place.copy_(parameter)
        for rank in range(at // share if share else 0, -(-end // share) if share else 0):
            low, high = max(at, rank * share), min(end, (rank + 1) * share)
            if low < high:
                runs[rank].append(Run(index, low - at, high - at, low - rank * share))
        at += length
    return Bucket(parameters, weights, share, runs)


def round_up(number: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-number // unit) * unit


def _main() -> None:
    from paceline.scratch._demo import joined_world, of_all_ranks, say
    from paceline.scratch.scatter import ScatterReducer
    from paceline.scratch.tree import Forest

    with joined_world() as (rank, world_size):
        torch.manual_seed(0)
        model = nn.Linear(100, 10)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        shards = Shards(model, rank, world_size)
        shards.shard(optimizer)
        reducer = ScatterReducer(shards, Forest([(r, r + 1) for r in range(world_size)], rank))
        with reducer.leaf(rank, is_last=True):
            model(torch.ones(4, 100)).sum().backward()
        reducer.finish(4 * world_size)
        optimizer.step()
        grads = sum(p.grad.numel() for piece in shards.pieces.values() if (p := piece.parameter).grad is not None)
        state = sum(t.numel() for state in optimizer.state.values() for t in state.values())
        say(f"{sum(p.numel() for p in model.parameters())} parameters; numbers that each rank keeps:")
        for what, count in (("gradients", grads), ("optimizer", state)):
            everybody = of_all_ranks(torch.tensor([count]))
            say(f"{what}   " + "   ".join(f"rank {r}: {n:.0f}" for r, [n] in enumerate(everybody)))


if __name__ == "__main__":
    _main()
