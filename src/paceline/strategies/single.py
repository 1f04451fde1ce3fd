"""One process and one device: the reference for all other strategies."""

from torch import nn

from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.validation import check_no_lazy_parameters, check_single_process


class Single(Strategy):
    can_defer_read = True

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
    ) -> None:
        check_single_process("single", world)
        check_no_lazy_parameters(model)
        super().__init__(model, make_optimizer(model.parameters()), world, virtual_ranks=virtual_ranks)
