"""The same bits at every world size: gradients are summed over virtual ranks, in the order of a fixed tree."""

from torch import Tensor, nn

from paceline.collectives.buckets import trainable_parameters
from paceline.collectives.control import Deferred
from paceline.collectives.norm import ShardedNorm, split_blocks_evenly
from paceline.collectives.reducer import make_reducer
from paceline.collectives.replicate import broadcast_module
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.buffers import partition_virtual_ranks
from paceline.strategies.validation import check_model


class Exact(Strategy):
    """Every world size from 1 to `virtual_ranks` computes the same bits: weights, state, losses, norms.

    This also requires deterministic kernels, and the same number of threads and the same processor model on all ranks.
    `train.determinism` configures and records these.
    """

    can_defer_read = keeps_partial_sums = True

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
    ) -> None:
        check_model(model, "exact", world)
        broadcast_module(model)
        reducer = make_reducer(model, partition_virtual_ranks(world, virtual_ranks or world.size), in_order=True)
        # every rank holds all gradients, so each one computes the norm of a part of them only
        sizes = [parameter.numel() for parameter in trainable_parameters(model)]
        shares = split_blocks_evenly(sizes, world.size)
        self._share, self._norm = shares[world.rank], ShardedNorm(sizes, shares, world.rank, world.device)
        self._whole_norm = ShardedNorm(sizes, split_blocks_evenly(sizes, 1), 0, world.device)
        optimizer = make_optimizer(model.parameters())
        super().__init__(model, optimizer, world, virtual_ranks=virtual_ranks, reducer=reducer)

    def _gradient_norm(self, tensors: list[Tensor]) -> Deferred[float]:
        parts = [(i, self.parameters[i].grad, start, stop) for i, start, stop in self._share]
        return self._norm({i: grad.reshape(-1)[start:stop] for i, grad, start, stop in parts if grad is not None})

    def _norm_on_device(self, tensors: list[Tensor]) -> Tensor:
        # each rank computes all of it, because the host would add the sums of the ranks
        flat = {i: p.grad.reshape(-1) for i, p in enumerate(self.parameters) if p.grad is not None}
        return self._whole_norm(flat).numbers.sqrt()
