"""Our own data parallelism: gradients travel in buckets while backward runs, or at once where all share memory."""

from contextlib import AbstractContextManager
from typing import Unpack

from torch import nn

from paceline.collectives.reducer import sum_by_rank
from paceline.collectives.replicate import broadcast_module
from paceline.data.plan import Work
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Replica, replica
from paceline.strategies.buffers import forest_of
from paceline.strategies.outer import Between
from paceline.strategies.refusals import refuse_lazy, refuse_sparse
from paceline.strategies.slow import between_hosts, nothing_held_back


def bucketed(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    world: World,
    /,
    *,
    virtual_ranks: int | None = None,
    **between: Unpack[Between],
) -> Replica:
    """Buckets in reverse order of the parameters, started by hooks during the last micro-batch's backward.

    Ranks that all share memory need none: they add up all gradients after backward, which is faster there. `between`
    says what is done between hosts on a slow network.

    Raises:
        ValueError: if the ranks' models differ in names, shapes or types, or these ranks cannot do what `between` says.
    """
    refuse_lazy(model)
    refuse_sparse(model, "bucketed")
    broadcast_module(model, group=world.group)
    if (slowly := between_hosts(model, make_optimizer, world, virtual_ranks, between)) is not None:
        return slowly
    reducer = sum_by_rank(model, forest_of(world, world.size), world.group)

    def backward(_: Work, is_last: bool) -> AbstractContextManager[None]:
        return reducer.leaf(world.rank, is_last=is_last)  # a stand-in's zeros count: a rank without samples has zeros

    made = replica(
        model,
        make_optimizer(model.parameters()),
        world,
        virtual_ranks=virtual_ranks,
        sync_gradients=reducer.finish,
        reset=reducer.reset,
        backward=backward,
    )
    return nothing_held_back(made)
