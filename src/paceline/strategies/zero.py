"""The bits of `exact`, with gradients and optimizer state sharded over ranks (ZeRO stage 2)."""

from collections.abc import Collection

from torch import Tensor, nn

from paceline.checkpoint.state import StateSource, TensorShard
from paceline.collectives.buckets import trainable_parameters
from paceline.collectives.control import Deferred
from paceline.collectives.norm import ShardedNorm
from paceline.collectives.owners import LocalShard
from paceline.collectives.reducer import make_shard_reducer
from paceline.collectives.replicate import broadcast_module
from paceline.collectives.shards import ParameterShards
from paceline.rank.world import World
from paceline.strategies import optimizers
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.buffers import partition_virtual_ranks
from paceline.strategies.optimizer_scope import find_update_scope
from paceline.strategies.validation import check_model, check_optimizer_parameters


class Zero(Strategy):
    """Sums gradients as `exact` does. Each rank receives its shard, and updates that shard of the parameters.

    Memory of each rank, for P parameters and N ranks: P weights, P/N gradients, P/N of each optimizer state tensor.
    While a rank accumulates several micro-batches, P gradients exist.
    """

    sharded = hides_gradients = keeps_partial_sums = True

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
    ) -> None:
        check_model(model, "zero", world)
        broadcast_module(model)
        optimizer = make_optimizer(model.parameters())
        scopes = [find_update_scope(opt, "strategy 'zero'") for opt in optimizers.each_optimizer(optimizer)]
        check_optimizer_parameters(model, optimizer)
        parameters, trained = trainable_parameters(model), optimizers.parameters_by_optimizer(optimizer)
        kinds = {p: number for number, own in enumerate(trained) for p in own}
        self._shards = shards = ParameterShards(model, world.rank, world.size, kinds=kinds)
        self._updated: dict[str, LocalShard] = {}
        for opt, scope in zip(optimizers.each_optimizer(optimizer), scopes, strict=True):
            self._updated |= shards.shard_optimizer(opt, whole=scope == "parameter")
        reducer = make_shard_reducer(shards, partition_virtual_ranks(world, virtual_ranks or world.size))
        held_by_rank = shards.ranges_by_rank()
        shares = [[(i, *held[p]) for i, p in enumerate(parameters) if p in held] for held in held_by_rank]
        sizes = [p.numel() for p in parameters]
        self._norm = ShardedNorm(sizes, shares, world.rank, world.device)
        self._pieces = {name: shards.pieces[p] for name, p in model.named_parameters() if p in shards.pieces}
        self._by_number = {i: shards.pieces[p].parameter for i, p in enumerate(parameters) if p in shards.pieces}
        super().__init__(model, optimizer, world, virtual_ranks=virtual_ranks, reducer=reducer, trained=trained)

    def _gradients(self) -> list[TensorShard]:
        shards = [(name, piece, piece.parameter.grad) for name, piece in self._pieces.items()]
        return [TensorShard(n, g, p.full_shape, p.start, replicated=False) for n, p, g in shards if g is not None]

    def _gradient_norm(self, tensors: list[Tensor]) -> Deferred[float]:
        return self._norm({i: p.grad for i, p in self._by_number.items() if p.grad is not None})

    def clear_pieces(self, kept: Collection[nn.Parameter], *, set_to_none: bool) -> None:
        clear = self._shards.drop_gradients if set_to_none else self._shards.zero_gradients
        clear(kept)

    def _optimizer_shards(self) -> list[TensorShard]:
        return optimizers.optimizer_shards_of_pieces(self._updated, self.optimizer)

    def _load_optimizer(self, source: StateSource) -> None:
        optimizers.load_saved_optimizer_state(self._updated, self.optimizer, source)
