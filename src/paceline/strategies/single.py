"""One process, one device: the first rung, and the yardstick of all others."""

from torch import nn

from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Replica, replica
from paceline.strategies.refusals import only_alone, refuse_lazy


def single(
    model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
) -> Replica:
    """Train without any communication.

    Raises:
        UsageError: in a world of more than one rank.
    """
    only_alone("single", world)
    refuse_lazy(model)
    return replica(model, make_optimizer(model.parameters()), world, virtual_ranks=virtual_ranks)
