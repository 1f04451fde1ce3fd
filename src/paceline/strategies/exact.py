"""The same bits at every world size: gradients are added up over virtual ranks, in the order of one fixed tree."""

from torch import Tensor, nn

from paceline.collectives.buckets import trainable
from paceline.collectives.control import Pending
from paceline.collectives.norm import SharedNorm, even_shares
from paceline.collectives.reducer import sum_by_leaf
from paceline.collectives.replicate import broadcast_module
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.buffers import forest_of
from paceline.strategies.validation import check_no_lazy_parameters, check_no_sparse_gradients, check_no_sync_batchnorm


class Exact(Strategy):
    """Every world size from 1 to `virtual_ranks` computes the very same bits: weights, state, losses, norms.

    For that, kernels must be deterministic too, and every rank use the same number of threads on the same kind of
    processor: `train.determinism` sets that up and writes it down.

    Raises:
        ValueError: if the ranks' models differ in names, shapes or types.
        UsageError: for synchronised batch norm, whose statistics are added up over ranks.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
    ) -> None:
        """See MakeStrategy."""
        check_no_sync_batchnorm(model, "exact")
        check_no_lazy_parameters(model)
        check_no_sparse_gradients(model, "exact")
        broadcast_module(model)
        reducer = sum_by_leaf(model, forest_of(world, virtual_ranks or world.size))
        # all hold all gradients, so each rank looks at a share of them only
        sizes = [parameter.numel() for parameter in trainable(model)]
        shares = even_shares(sizes, world.size)
        self._share, self._norm = shares[world.rank], SharedNorm(sizes, shares, world.rank, world.device)
        optimizer = make_optimizer(model.parameters())
        super().__init__(model, optimizer, world, virtual_ranks=virtual_ranks, reducer=reducer)

    def _gradient_norm(self, own: list[Tensor]) -> Pending[float]:
        mine = [(i, self.parameters[i].grad, start, stop) for i, start, stop in self._share]
        return self._norm({i: grad.reshape(-1)[start:stop] for i, grad, start, stop in mine if grad is not None})
