"""How can N ranks train with an N-th of the optimizer's memory each?

Adam keeps two numbers for every parameter, the same ones on every rank. Here each rank keeps them for its share only,
updates that share, and an all-gather brings the updated shares together (ZeRO stage 1: Rajbhandari et al. 2020, "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models"). The update of an element-wise optimizer does not
depend on who else is updated beside it, so the result has the very same bits.

All parameters of one type are laid into one flat tensor, which is cut into N equal shares: so every rank has the same
amount, whatever the sizes of the parameters, and the gather needs no copies. With 10 elements a cut, 2 ranks:

    parameters   a (6 elements), b (12)
    flat         a a a a a a b b b b | b b b b b b b b . .
    rank 0 updates a and the first 4 of b, rank 1 the other 8

Run me: `torchrun --nproc-per-node 2 -m paceline.scratch.zero`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.scratch.reduce import named
from paceline.scratch.tree import gather_shares

ALIGNED = 64  # elements: pieces begin where a vector does, so an element meets the same instruction in any share


@dataclass(frozen=True)
class Piece:
    """This rank's run of a parameter's elements, [start, stop) of it flattened, as a parameter of its own."""

    start: int
    stop: int
    parameter: nn.Parameter


class Shards:
    """A module's parameters, laid flat and cut into shares: `pieces` are those of this rank."""

    def __init__(
        self, module: nn.Module, rank: int, world_size: int, *, group: dist.ProcessGroup | None = None
    ) -> None:
        """Move the data of every parameter that requires a gradient; the parameters stay the same objects.

        Raises:
            ValueError: if two parameters are views of one memory, which would be torn apart.
        """
        self.pieces: dict[nn.Parameter, Piece] = {}
        self._flats: list[Tensor] = []
        self._rank, self._world_size, self._group = rank, world_size, group
        alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
        places: set[int] = set()
        for parameter in module.parameters():
            if parameter.requires_grad:
                place = parameter.untyped_storage().data_ptr()
                if place in places and parameter.numel():
                    raise ValueError(
                        f"a parameter of shape {tuple(parameter.shape)} shares its memory with another one: laid flat, "
                        "they would be two. Use one parameter, or another strategy."
                    )
                places.add(place)
                alike[parameter.dtype, parameter.device].append(parameter)
        for parameters in alike.values():
            self._lay(parameters)

    @torch.no_grad()
    def _lay(self, parameters: list[nn.Parameter]) -> None:
        lengths = [_round_up(p.numel(), ALIGNED) for p in parameters]
        share = _round_up(sum(lengths), ALIGNED * self._world_size) // self._world_size
        flat = parameters[0].new_zeros(share * self._world_size)
        mine = (self._rank * share, (self._rank + 1) * share)
        at = 0
        for parameter, length in zip(parameters, lengths, strict=True):
            place = flat[at : at + parameter.numel()].view(parameter.shape)
            parameter.data = place.copy_(parameter)
            start, stop = max(at, mine[0]) - at, min(at + parameter.numel(), mine[1]) - at
            if start < stop:
                self.pieces[parameter] = Piece(start, stop, nn.Parameter(flat[at + start : at + stop]))
            at += length
        self._flats.append(flat)

    def shard(self, optimizer: Optimizer) -> None:
        """Let `optimizer`, made for the module's parameters, update this rank's pieces instead, and then gather.

        Its groups and all their options stay, so schedulers work as ever.
        """
        for group in optimizer.param_groups:
            group["params"] = [self.pieces[p].parameter for p in group["params"] if p in self.pieces]
        optimizer.register_step_pre_hook(self._take_gradients)
        optimizer.register_step_post_hook(self._gather)

    def _take_gradients(self, *_: object) -> None:
        for parameter, piece in self.pieces.items():
            grad = parameter.grad
            piece.parameter.grad = None if grad is None else grad.reshape(-1)[piece.start : piece.stop]

    def _gather(self, *_: object) -> None:
        """Bring all ranks' shares together (a collective)."""
        for piece in self.pieces.values():
            piece.parameter.grad = None
        if self._world_size == 1:
            return
        own = [named(flat.view(self._world_size, -1)[self._rank], "weights") for flat in self._flats]
        for work in [gather_shares(flat, mine, self._group) for flat, mine in zip(self._flats, own, strict=True)]:
            work.wait()


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _main() -> None:
    from paceline.scratch._demo import joined_world, of_all_ranks, say

    with joined_world() as (rank, world_size):
        torch.manual_seed(0)
        model = nn.Linear(100, 10)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        shards = Shards(model, rank, world_size)
        shards.shard(optimizer)
        model(torch.ones(4, 100)).sum().backward()
        optimizer.step()
        kept = sum(t.numel() for state in optimizer.state.values() for t in state.values())
        say(f"{sum(p.numel() for p in model.parameters())} parameters; numbers that each rank's optimizer keeps:")
        say("   ".join(f"rank {r}: {n:.0f}" for r, [n] in enumerate(of_all_ranks(torch.tensor([kept])))))


if __name__ == "__main__":
    _main()
