"""What makes of the strategy for a part of a model, made among the ranks that hold that part, one for the whole model.

The strategy knows of no other parts: to it the part is the model, and the world those ranks. What is of all parts is
added here: the norm of all gradients, the state in whole tensors' coordinates, the weights.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.checkpoint.shards import ShardedParameter, ShardedSource, sharded_as, whole
from paceline.checkpoint.state import Source, TensorShard
from paceline.collectives.control import Pending, sum_over_ranks
from paceline.rank.world import World


class ModelParallel:
    """What the ranks that hold the parts of a model add to the strategy of each part; see `Strategy.parts`."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        shards: Mapping[str, ShardedParameter],
        is_elsewhere: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Prepare it.

        Args:
            model: this rank's part.
            world: all ranks, laid out in a mesh.
            shards: by name the parameters of which this rank holds a shard only.
            is_elsewhere: whether what has this name, and is held here, is another stage's to save.
        """
        assert world.mesh is not None
        self._model, self._world, self._shards, self._is_elsewhere = model, world, shards, is_elsewhere
        self._copy = world.along("tensor").rank + world.along("context").rank  # of what is not sharded; 0 is the first
        self._in_stages = world.mesh.of("pipeline") > 1

    def as_shards_of_whole(self, held: Sequence[TensorShard]) -> list[TensorShard]:
        """What this rank holds of its part, as shards of the whole model's tensors."""
        found: list[TensorShard] = []
        for one in held:
            sharded = sharded_as(one.name, self._shards)
            # the next along data holds it, too
            again = one.spare or self._is_elsewhere(one.name) or (one.replicated and self._world.data.rank > 0)
            if sharded is not None and one.shape == sharded.shape:
                found += [replace(piece, replicated=False, spare=again) for piece in sharded.held(one)]
            elif one.replicated and not self._in_stages:
                found.append(one)
            else:
                found.append(replace(one, replicated=False, spare=again or self._copy > 0))
        return found

    def norm(self, gradients: Iterable[TensorShard]) -> Pending[float]:
        """The norm of the whole model's gradients (a collective)."""
        return global_norm(gradients, self._world)

    def after_reduction(self, finite: bool | Pending[bool] | None) -> bool | Pending[bool] | None:
        """The gradients of this part were reduced; `finite` is what is known of them."""
        return finite

    def weights(
        self, weights: Callable[[], Mapping[str, Tensor]], state: Callable[[], list[TensorShard]]
    ) -> Mapping[str, Tensor]:
        """The weights of the whole model, from the `weights` and the `state` of this part (a collective)."""
        found = dict(weights())
        held = [one for one in self.as_shards_of_whole(state()) if one.name.removeprefix("model/") in self._shards]
        wholes = {name.removeprefix("model/"): tensor for name, tensor in whole(held, self._world).items()}
        first = {id(p): name for name, p in self._model.named_parameters()}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):  # tied ones have several
            if first[id(parameter)] in wholes:
                found[name] = wholes[first[id(parameter)]]
        return found

    def source(self, source: Source) -> Source:
        """A saved state of the whole model, as one of this part."""
        return ShardedSource(source, self._shards)


def global_norm(gradients: Iterable[TensorShard], world: World) -> Pending[float]:
    """Of what all ranks hold together, each element once (a collective)."""
    total = torch.zeros(1, dtype=torch.float64, device=world.device)
    for held in gradients:
        if not (held.spare or (held.replicated and world.rank > 0)):
            total += held.tensor.double().square().sum()
    return Pending(sum_over_ranks(total, "norm of the gradients", world.group), lambda squares: math.sqrt(squares[0]))
