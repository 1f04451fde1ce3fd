"""Our own data parallelism: gradients travel in buckets while backward still runs."""

from __future__ import annotations

from contextlib import nullcontext

from torch import nn

from paceline.scratch.reduce import GradientReducer
from paceline.scratch.replicate import broadcast_module
from paceline.strategies.base import MakeOptimizer, Replica, replica
from paceline.world import World


def bucketed(
    model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
) -> Replica:
    """Buckets in reverse order of the parameters, started by hooks during the last micro-batch's backward.

    Raises:
        ValueError: if the ranks' models differ in names, shapes or types.
    """
    broadcast_module(model)
    reducer = GradientReducer(model)
    return replica(
        model,
        make_optimizer(model.parameters()),
        world,
        virtual_ranks=virtual_ranks,
        sync_gradients=reducer.finish,
        backward=lambda _, is_last: nullcontext() if is_last else reducer.paused(),
    )
