"""Extends a strategy for one part of a model to the whole model, for tensor, context and pipeline parallelism.

A strategy trains one part of the model, on the ranks that hold this part: to the strategy the part is the model, and
these ranks are the world. This module adds results of all parts: the gradient norm, the weights, and the state as
shards of whole tensors.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.checkpoint.export import saved_names_by_state_dict_name
from paceline.checkpoint.shards import (
    ParameterShard,
    SlicedSource,
    find_parameter_shard_of_tensor,
    gather_full_state,
)
from paceline.checkpoint.state import StateSource, TensorShard
from paceline.collectives.control import Deferred, sum_over_ranks
from paceline.rank.world import World


class WholeModelView:
    """Results of all parts of a model, for the strategy of one part; see `Strategy.parts`."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        shards: Mapping[str, ParameterShard],
        is_elsewhere: Callable[[str], bool] = lambda _: False,
    ) -> None:
        assert world.mesh is not None
        self._model, self._world, self._shards, self._is_elsewhere = model, world, shards, is_elsewhere
        # the number of this rank's copy of the unsharded tensors
        self._copy = world.along("tensor").rank + world.along("context").rank
        self._in_stages = world.mesh.size_of("pipeline") > 1

    def as_shards_of_whole(self, held: Sequence[TensorShard]) -> list[TensorShard]:
        shards: list[TensorShard] = []
        for tensor in held:
            sharded = find_parameter_shard_of_tensor(tensor.name, self._shards)
            # the ranks along data also hold it
            is_spare = (
                tensor.is_saved_elsewhere
                or self._is_elsewhere(tensor.name)
                or (tensor.replicated and self._world.data.rank > 0)
            )
            if sharded is not None and tensor.full_shape == sharded.shape:
                shards += [
                    replace(piece, replicated=False, is_saved_elsewhere=is_spare)
                    for piece in sharded.split_into_full_ranges(tensor)
                ]
            elif tensor.replicated and not self._in_stages:
                shards.append(tensor)
            else:
                shards.append(replace(tensor, replicated=False, is_saved_elsewhere=is_spare or self._copy > 0))
        return shards

    def gradient_norm(self, gradients: Iterable[TensorShard]) -> Deferred[float]:
        return global_norm(gradients, self._world)

    def after_reduction(self, finite: bool | Deferred[bool] | None) -> bool | Deferred[bool] | None:
        """Called after the reduction of this part's gradients. `finite`: whether they are finite, if known."""
        return finite

    def weights(
        self, weights: Callable[[], Mapping[str, Tensor]], state: Callable[[], list[TensorShard]]
    ) -> Mapping[str, Tensor]:
        whole = self.as_shards_of_whole(state())
        shards = [shard for shard in whole if shard.name.removeprefix("model/") in self._shards]
        return {**weights(), **full_weights(self._model, shards, self._world)}

    def local_shard_source(self, source: StateSource) -> StateSource:
        return SlicedSource(source, self._shards)


def full_weights(model: nn.Module, shards: Sequence[TensorShard], world: World) -> dict[str, Tensor]:
    """The full tensors of some `model/` shards, by all their names in the state_dict (a collective)."""
    full = gather_full_state(shards, world)
    return {
        name: full[key]
        for name, saved in saved_names_by_state_dict_name(model).items()
        if (key := f"model/{saved}") in full
    }


def global_norm(gradients: Iterable[TensorShard], world: World) -> Deferred[float]:
    """The norm of the gradients of all ranks, with each element counted once (a collective)."""
    total = torch.zeros(1, dtype=torch.float64, device=world.device)
    for shard in gradients:
        if not (shard.is_saved_elsewhere or (shard.replicated and world.rank > 0)):
            total += shard.tensor.double().square().sum()
    return Deferred(sum_over_ranks(total, "norm of the gradients", world.group), lambda squares: math.sqrt(squares[0]))
