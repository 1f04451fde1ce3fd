"""The textbook's first page: broadcast the model once, then all-reduce every gradient after backward."""

from torch import Tensor, nn

from paceline.scratch.reduce import all_reduce_gradients
from paceline.strategies.base import MakeOptimizer, Replica, replica
from paceline.sums.buckets import trainable
from paceline.sums.replicate import broadcast_module
from paceline.worker.world import World


def manual(
    model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
) -> Replica:
    """One message per parameter, after backward has ended: right, simple and slow.

    Raises:
        ValueError: if the ranks' models differ in names, shapes or types.
    """
    broadcast_module(model)
    parameters = trainable(model)

    def sync_gradients(total_weight: Tensor) -> None:
        all_reduce_gradients(parameters, total_weight)

    def reset() -> None:
        all_reduce_gradients(parameters, 1.0)  # other ranks may wait for ours

    return replica(
        model,
        make_optimizer(model.parameters()),
        world,
        virtual_ranks=virtual_ranks,
        sync_gradients=sync_gradients,
        reset=reset,
    )
