"""Data parallelism in buckets: ranks all-reduce gradients while backward runs, or after it in shared memory."""

from typing import Unpack

from torch import Tensor, nn

from paceline.checkpoint.state import StateSource
from paceline.collectives.buckets import grad_of
from paceline.collectives.control import Deferred, scale_and_check_gradients
from paceline.collectives.reducer import check_gradients, make_reducer
from paceline.collectives.replicate import broadcast_module
from paceline.collectives.torch_communicator import print_on_rank_0
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.buffers import partition_virtual_ranks
from paceline.strategies.inter_node import InterNodeOptions, describe_node_sizes, inter_node_strategy
from paceline.strategies.validation import check_model


def bucketed(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    world: World,
    /,
    *,
    virtual_ranks: int | None = None,
    **options: Unpack[InterNodeOptions],
) -> Strategy:
    """All-reduce gradients in buckets, in reverse order of the parameters.

    Hooks start each bucket during the backward of the last micro-batch. Ranks that all share memory use no buckets:
    they sum all gradients after backward, which is faster in memory. `options`: compression or local steps between
    nodes on a slow network. For the other arguments see MakeStrategy.
    """
    check_model(model, "bucketed", world)
    broadcast_module(model, group=world.group)
    if (strategy := inter_node_strategy(model, make_optimizer, world, virtual_ranks, options)) is not None:
        return strategy
    return Bucketed(model, make_optimizer, world, virtual_ranks=virtual_ranks)


class Bucketed(Strategy):
    """See `bucketed`. A single rank has nothing to sum, but raises the same errors as several ranks."""

    can_defer_read = True

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
    ) -> None:
        partition = partition_virtual_ranks(world, world.size)
        reducer = make_reducer(model, partition, world.group, in_order=False) if world.size > 1 else None
        optimizer = make_optimizer(model.parameters())
        super().__init__(model, optimizer, world, virtual_ranks=virtual_ranks, reducer=reducer)
        self._names = {p: name for name, p in model.named_parameters()}
        self._numels = [p.numel() for p in self.parameters]

    def _reduce(self, divisor: float | Tensor) -> bool | Deferred[bool] | None:
        if self.reducer is not None:
            return self.reducer.finish(divisor) or None
        check_gradients(self.parameters, [*map(grad_of, self.parameters)], self._numels, self._names)
        return scale_and_check_gradients(self.parameters, 1 / divisor, self.world.device)

    def _load(self, source: StateSource) -> None:
        super()._load(source)
        saved = source.tensor("feedback/division")
        if saved is not None and any(not name.endswith("/used") for name in source.names("feedback/0/")):
            print_on_rank_0(
                f"the checkpoint was saved on {describe_node_sizes(saved)}: their compression residuals are dropped"
            )
