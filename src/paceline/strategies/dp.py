"""One process, many GPUs: torch's nn.DataParallel, kept to show what came before one process per GPU."""

from torch import nn

from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.validation import check_no_lazy_parameters, check_single_process


class DataParallel(Strategy):
    """Let one process divide each micro-batch over all its GPUs, one thread each.

    On a CPU, or on one GPU, nn.DataParallel only calls the module, so this is the same as `single`. Over several
    GPUs each one normalises its own piece (batch norm) and only the first one's running statistics are kept.

    Raises:
        UsageError: in a world of more than one rank.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
    ) -> None:
        """See MakeStrategy."""
        check_single_process("dp", world)
        check_no_lazy_parameters(model)
        optimizer = make_optimizer(model.parameters())
        super().__init__(model, optimizer, world, virtual_ranks=virtual_ranks, module=nn.DataParallel(model))
