"""One process and one device: the reference for all other strategies."""

from torch import nn

from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.validation import check_model


class Single(Strategy):
    can_defer_read = True

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
    ) -> None:
        check_model(model, "single", world)
        super().__init__(model, make_optimizer(model.parameters()), world, virtual_ranks=virtual_ranks)
