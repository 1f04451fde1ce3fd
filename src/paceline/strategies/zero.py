"""The bits of `exact`, with an N-th of the gradients' and of the optimizer's memory on each of N ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from paceline.checkpoint.state import Held, Source
from paceline.collectives.moves import all_gather, reduce_scatter
from paceline.collectives.replicate import broadcast_module
from paceline.collectives.totals import sum_over_ranks
from paceline.collectives.transport import shared_memory
from paceline.scratch.norm import SharedNorm
from paceline.scratch.scatter import AllToAll, Scatter, ScatterReducer
from paceline.scratch.tree import Forest, gather_shares
from paceline.scratch.zero import Gather, Shards
from paceline.strategies.base import MakeOptimizer, Replica, forest, leaf_of, replica, trainable
from paceline.strategies.held import hold_pieces, load_pieces
from paceline.strategies.refusals import refuse_foreign, refuse_synchronised, refuse_whole
from paceline.worker.world import World


def zero(
    model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
) -> Replica:
    """Gradients are added up as in `exact`; each rank is given its share, and updates that share of the parameters.

    Memory of each rank, for P parameters in N ranks: P weights, P/N gradients, P/N of what the optimizer keeps. While
    a rank adds up several micro-batches, P gradients exist.

    Raises:
        ValueError: if the ranks' models differ in names, shapes or types.
        UsageError: for synchronised batch norm, and for an optimizer that looks at more than one element at a time.
    """
    refuse_synchronised(model, "zero")
    broadcast_module(model)
    optimizer = make_optimizer(model.parameters())
    refuse_whole("zero", optimizer)
    refuse_foreign(model, optimizer)
    parameters = trainable(model)
    scatter, gather = _transports(parameters)
    shards = Shards(model, world.rank, world.size, gather=gather)
    shards.shard(optimizer)
    reducer = ScatterReducer(shards, forest(world, virtual_ranks), scatter=scatter)
    norm = SharedNorm(
        [p.numel() for p in parameters], shards.shares(parameters), world.rank, world.device, sum_over_ranks
    )
    pieces = {name: shards.pieces[p] for name, p in model.named_parameters() if p in shards.pieces}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def gradients() -> list[Held]:
        held = {name: (piece.parameter.grad, piece.start) for name, piece in pieces.items()}
        return [Held(n, g, shapes[n], start, replicated=False) for n, (g, start) in held.items() if g is not None]

    def gradient_norm() -> Tensor:
        own = {i: shards.pieces[p].parameter.grad for i, p in enumerate(parameters) if p in shards.pieces}
        return norm({i: gradient for i, gradient in own.items() if gradient is not None})

    def hold() -> list[Held]:
        return hold_pieces(pieces, shapes, optimizer)

    def load(source: Source) -> None:
        load_pieces(pieces, shapes, optimizer, source)

    return replica(
        model,
        optimizer,
        world,
        virtual_ranks=virtual_ranks,
        sync_gradients=reducer.finish,
        backward=leaf_of(reducer),
        gradients=gradients,
        gradient_norm=gradient_norm,
        sharded=True,
        hold=hold,
        load=load,
    )


def _transports(parameters: Sequence[nn.Parameter]) -> tuple[Scatter, Gather]:
    """How gradients get to whom they belong, and weights to all: where all ranks share memory, through it."""
    on_cpu = all(p.device.type == "cpu" and not p.is_complex() for p in parameters)
    memory = shared_memory() if on_cpu else None
    if memory is None:
        return AllToAll, gather_shares

    def scatter(forest: Forest, own: Sequence[Tensor], group: dist.ProcessGroup | None, name: str) -> _Arrived:
        share = own[0].new_empty(len(own[0]) // memory.size)
        return _Arrived(reduce_scatter(memory, own, forest, share, name=name))

    def gather(whole: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> _Arrived:
        all_gather(memory, mine, whole, "weights")
        return _Arrived(whole)

    return scatter, gather


@dataclass(frozen=True)
class _Arrived:
    """Memory is as fast as a copy: nothing is gained by doing something else meanwhile."""

    values: Tensor

    def end(self) -> Tensor:
        """See scratch.scatter.Scattering."""
        return self.values

    def wait(self) -> None:
        """See scratch.zero.Gathering."""
