"""Our own data parallelism: gradients travel in buckets while backward runs, or at once where all share memory."""

from operator import attrgetter
from typing import Unpack

import torch
from torch import Tensor, nn

from paceline.checkpoint.state import Source
from paceline.collectives.communicator import print_notice
from paceline.collectives.control import Deferred
from paceline.collectives.reducer import check_gradients, sum_by_rank
from paceline.collectives.replicate import broadcast_module
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.buffers import partition_of
from paceline.strategies.outer import Between
from paceline.strategies.refusals import refuse_lazy, refuse_sparse
from paceline.strategies.slow import between_hosts, hosts_of

_layout = attrgetter("layout")


def bucketed(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    world: World,
    /,
    *,
    virtual_ranks: int | None = None,
    **between: Unpack[Between],
) -> Strategy:
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
    return Bucketed(model, make_optimizer, world, virtual_ranks=virtual_ranks)


class Bucketed(Strategy):
    """See `bucketed`. One rank alone has nothing to sum, but raises the errors that several would raise."""

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
    ) -> None:
        """See MakeStrategy."""
        alone = world.size == 1
        reducer = None if alone else sum_by_rank(model, partition_of(world, world.size), world.group)
        optimizer = make_optimizer(model.parameters())
        super().__init__(model, optimizer, world, virtual_ranks=virtual_ranks, reducer=reducer)
        self._names = {p: name for name, p in model.named_parameters()}
        self._numels = [p.numel() for p in self.parameters]

    def _reduce(self, divisor: float | Tensor) -> bool | Deferred[bool] | None:
        if self.reducer is None:
            grads = [p.grad for p in self.parameters if p.grad is not None]
            is_dense = {*map(_layout, grads)} <= {torch.strided}
            if not is_dense or [*map(Tensor.numel, self.parameters)] != self._numels:
                check_gradients(self.parameters, self._numels, self._names)
        return super()._reduce(divisor)

    def _load(self, source: Source) -> None:
        super()._load(source)
        saved = source.tensor("feedback/division")
        if saved is not None and any(not name.endswith("/used") for name in source.names("feedback/0/")):
            print_notice(f"the checkpoint is of {hosts_of(saved)}: what they held back is dropped")
