"""torch's nn.DataParallel: one process, several GPUs. For comparison with one process per GPU."""

from torch import nn

from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.validation import check_model


class DataParallel(Strategy):
    """One process splits each micro-batch over all its GPUs, with one thread for each.

    On a CPU or a single GPU, nn.DataParallel only calls the module, so the result is that of `single`. On several GPUs
    batch norm normalises the piece of each GPU separately, and only the statistics of the first GPU are kept.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
    ) -> None:
        check_model(model, "dp", world)
        optimizer = make_optimizer(model.parameters())
        super().__init__(model, optimizer, world, virtual_ranks=virtual_ranks, module=nn.DataParallel(model))
