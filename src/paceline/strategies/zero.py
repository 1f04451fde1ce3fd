"""The bits of `exact`, with an N-th of the gradients' and of the optimizer's memory on each of N ranks."""

from torch import nn

from paceline.checkpoint.state import TensorShard
from paceline.collectives.buckets import trainable
from paceline.collectives.control import Pending
from paceline.collectives.norm import SharedNorm
from paceline.collectives.reducer import sum_to_shares
from paceline.collectives.replicate import broadcast_module
from paceline.collectives.shards import Shards
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Replica, replica
from paceline.strategies.buffers import forest_of
from paceline.strategies.held import hold_pieces, load_pieces
from paceline.strategies.refusals import refuse_foreign, refuse_lazy, refuse_sparse, refuse_synchronised, refuse_whole


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
    refuse_lazy(model)
    refuse_sparse(model, "zero")
    broadcast_module(model)
    optimizer = make_optimizer(model.parameters())
    refuse_whole("zero", optimizer)
    refuse_foreign(model, optimizer)
    parameters = trainable(model)
    shards = Shards(model, world.rank, world.size)
    shards.shard(optimizer)
    reducer = sum_to_shares(shards, forest_of(world, virtual_ranks or world.size))
    norm = SharedNorm([p.numel() for p in parameters], shards.shares(parameters), world.rank, world.device)
    pieces = {name: shards.pieces[p] for name, p in model.named_parameters() if p in shards.pieces}

    def gradients() -> list[TensorShard]:
        own = [(name, piece, piece.parameter.grad) for name, piece in pieces.items()]
        return [TensorShard(n, g, p.whole, p.start, replicated=False) for n, p, g in own if g is not None]

    def gradient_norm() -> Pending[float]:
        own = {i: shards.pieces[p].parameter.grad for i, p in enumerate(parameters) if p in shards.pieces}
        return norm({i: gradient for i, gradient in own.items() if gradient is not None})

    return replica(
        model,
        optimizer,
        world,
        virtual_ranks=virtual_ranks,
        sync_gradients=reducer.finish,
        reset=reducer.reset,
        backward=reducer.backward,
        gradients=gradients,
        gradient_norm=gradient_norm,
        sharded=True,
        hold=lambda: hold_pieces(pieces, optimizer),
        load=lambda source: load_pieces(pieces, optimizer, source),
    )
