"""Tensors of any number and shape from every rank, on every rank."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.sums.places import place_hash, places
from paceline.sums.ranks import ranks
from paceline.sums.words import gather_words
from paceline.worker.world import World


def gather_tensors(value: Any, world: World, name: str, *, where: Sequence[int] = ()) -> list[Any]:
    """Every rank's `value`, by rank, on every rank, the same to the bit, on the world's device (a collective).

    Args:
        value: tensors in lists and dicts with words as keys, beside whatever else JSON can hold there. Ranks may have
            different ones.
        world: of all ranks.
        name: for the hang guard.
        where: must be the same on all ranks, as the place of the program must.

    Raises:
        TrainingError: with MISMATCH, if ranks call from different places; see `places`. ToldElsewhere on all but one.
    """
    if world.size == 1:
        return [value]
    held: list[Tensor] = []
    mine = [_described(value, held), [[str(t.dtype)[6:], [*t.shape]] for t in held], place_hash(where)]
    found_of = gather_words(mine, world)
    places().compare([place for *_, place in found_of], name, partial(gather_words, world=world))
    told = [(described, kinds) for described, kinds, _ in found_of]
    copies = [t.detach().to(world.device).clone(memory_format=torch.contiguous_format) for t in held]
    mine = torch.cat([torch.empty(0, dtype=torch.uint8, device=world.device), *(_bytes(t) for t in copies)])
    sizes = [[math.prod(shape) * getattr(torch, kind).itemsize for kind, shape in kinds] for _, kinds in told]
    padded = mine.new_zeros(max(map(sum, sizes)))
    padded[: len(mine)] = mine
    parts = ranks().start_gather(padded, name)() if len(padded) else [padded] * world.size
    found: list[Any] = []
    for (described, kinds), of_rank, part in zip(told, sizes, parts, strict=True):
        pieces = part[: sum(of_rank)].split(of_rank)
        tensors = [_tensor(piece, *kind) for piece, kind in zip(pieces, kinds, strict=True)]
        found.append(_filled(described, tensors))
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _tensor(content: Tensor, kind: str, shape: list[int]) -> Tensor:
    return content.clone().view(getattr(torch, kind)).view(shape)  # a copy begins where a number may


def _described(value: Any, held: list[Tensor]) -> Any:
    """`value` with numbers in place of its tensors, which are put into `held`."""
    if isinstance(value, Tensor):
        held.append(value)
        return {"tensor": len(held) - 1}
    if isinstance(value, Mapping):
        return {"table": {key: _described(part, held) for key, part in value.items()}}
    return [_described(part, held) for part in value] if isinstance(value, (list, tuple)) else value


def _filled(told: Any, tensors: list[Tensor]) -> Any:
    """What `_described` was given."""
    if isinstance(told, list):
        return [_filled(part, tensors) for part in told]
    if not isinstance(told, dict):
        return told
    if "tensor" in told:
        return tensors[told["tensor"]]
    return {key: _filled(part, tensors) for key, part in told["table"].items()}
