"""The same bits at every world size: gradients are added up over virtual ranks, in the order of one fixed tree."""

from torch import nn

from paceline.collectives.buckets import trainable
from paceline.collectives.control import Pending
from paceline.collectives.norm import SharedNorm, even_shares
from paceline.collectives.reducer import sum_by_leaf
from paceline.collectives.replicate import broadcast_module
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Replica, replica
from paceline.strategies.buffers import forest_of
from paceline.strategies.refusals import refuse_lazy, refuse_sparse, refuse_synchronised


def exact(
    model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
) -> Replica:
    """Every world size from 1 to `virtual_ranks` computes the very same bits: weights, state, losses, norms.

    For that, kernels must be deterministic too, and every rank use the same number of threads on the same kind of
    processor: `train.determinism` sets that up and writes it down.

    Raises:
        ValueError: if the ranks' models differ in names, shapes or types.
        UsageError: for synchronised batch norm, whose statistics are added up over ranks.
    """
    refuse_synchronised(model, "exact")
    refuse_lazy(model)
    refuse_sparse(model, "exact")
    broadcast_module(model)
    reducer = sum_by_leaf(model, forest_of(world, virtual_ranks or world.size))
    parameters = trainable(model)
    # all hold all gradients, so each rank looks at a share of them only
    sizes = [parameter.numel() for parameter in parameters]
    shares = even_shares(sizes, world.size)
    norm = SharedNorm(sizes, shares, world.rank, world.device)

    def gradient_norm() -> Pending[float]:
        own = [(i, parameters[i].grad, start, stop) for i, start, stop in shares[world.rank]]
        return norm({i: grad.reshape(-1)[start:stop] for i, grad, start, stop in own if grad is not None})

    return replica(
        model,
        make_optimizer(model.parameters()),
        world,
        virtual_ranks=virtual_ranks,
        sync_gradients=reducer.finish,
        reset=reducer.reset,
        gradient_norm=gradient_norm,
        backward=reducer.backward,
    )
