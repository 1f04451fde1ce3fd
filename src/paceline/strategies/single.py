"""One process, one device: what all other strategies are compared with."""

from torch import nn

from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.refusals import only_alone, refuse_lazy


class Single(Strategy):
    """Train without any communication.

    Raises:
        UsageError: in a world of more than one rank.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
    ) -> None:
        """See MakeStrategy."""
        only_alone("single", world)
        refuse_lazy(model)
        super().__init__(model, make_optimizer(model.parameters()), world, virtual_ranks=virtual_ranks)
