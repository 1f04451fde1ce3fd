"""A replica of this rank's part of a model, made among the ranks that hold the same part, as one of the whole model.

The strategy knows of no other parts: to it the part is the model, and the world those ranks. What is of all parts is
added here: the norm of all gradients, the state in whole tensors' coordinates, the weights.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.checkpoint.shards import ShardedParameter, ShardedSource, sharded_as, whole
from paceline.checkpoint.state import Source, TensorShard
from paceline.collectives.control import Pending, sum_over_ranks
from paceline.collectives.norm import scale_to_norm
from paceline.rank.world import World
from paceline.strategies.base import Replica


def of_parts(
    part: Replica,
    world: World,
    cuts: Mapping[str, ShardedParameter],
    elsewhere: Callable[[str], bool] = lambda _: False,
) -> Replica:
    """The replica of the whole model, of which `part` is this rank's, made among the ranks of `world.data`.

    Args:
        part: from a strategy.
        world: all ranks, laid out in a mesh; without one, `part` is all there is.
        cuts: by name the parameters of which this rank holds a part only.
        elsewhere: whether what has this name, and is held here, is another stage's to save.
    """
    if world.mesh is None or not world.mesh.shares_model:
        return replace(part, world=world)
    copy = world.along("tensor").rank + world.along("context").rank  # of what is not cut; 0 is the first
    in_stages = world.mesh.of("pipeline") > 1

    def lifted(held: Sequence[TensorShard]) -> list[TensorShard]:
        found: list[TensorShard] = []
        for one in held:
            sharded = sharded_as(one.name, cuts)
            # the next along data holds it, too
            again = one.spare or elsewhere(one.name) or (one.replicated and world.data.rank > 0)
            if sharded is not None and one.shape == sharded.shape:
                found += [replace(piece, replicated=False, spare=again) for piece in sharded.held(one)]
            elif one.replicated and not in_stages:
                found.append(one)
            else:
                found.append(replace(one, replicated=False, spare=again or copy > 0))
        return found

    def gradients() -> list[TensorShard]:
        return lifted(part.gradients())

    def clip_grad_norm(max_norm: float) -> Pending[float]:
        mine = [held.tensor for held in part.gradients()]
        return norm_of(gradients(), world).then(lambda norm: scale_to_norm(mine, norm, max_norm))

    def weights() -> Mapping[str, Tensor]:
        found = dict(part.weights())
        held = [one for one in lifted(part.state()) if one.name.removeprefix("model/") in cuts]
        wholes = {name.removeprefix("model/"): tensor for name, tensor in whole(held, world).items()}
        first = {id(p): name for name, p in part.model.named_parameters()}
        for name, parameter in part.model.named_parameters(remove_duplicate=False):  # tied ones have several
            if first[id(parameter)] in wholes:
                found[name] = wholes[first[id(parameter)]]
        return found

    def load(source: Source) -> None:
        part.load(ShardedSource(source, cuts))

    return replace(
        part, world=world, gradients=gradients, sharded=True, clip_grad_norm=clip_grad_norm, weights=weights,
        state=lambda: lifted(part.state()), load=load,
    )  # fmt: skip


def norm_of(gradients: Iterable[TensorShard], world: World) -> Pending[float]:
    """Of what all ranks hold together, each element once (a collective)."""
    total = torch.zeros(1, dtype=torch.float64, device=world.device)
    for held in gradients:
        if not (held.spare or (held.replicated and world.rank > 0)):
            total += held.tensor.double().square().sum()
    return Pending(sum_over_ranks(total, "norm of the gradients", world.group), lambda squares: math.sqrt(squares[0]))
