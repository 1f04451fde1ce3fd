"""Which layers of a model are cut along `tensor`, and how: found by their shapes, their order and their names.

What is cut in an unlucky place is slow, never wrong (see `view`), so the rules may guess: a linear layer whose outputs
are the next one's inputs is cut by columns and that one by rows; so are queries, keys and values, and the layer behind
them, by heads; embeddings, and the layer that gives a word's scores, by words.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from paceline.checkpoint.shards import ShardedParameter
from paceline.errors import UsageError, first_few, unknown
from paceline.rank.world import World
from paceline.tensor.guess import CutLayer, guessed
from paceline.tensor.layers import cut_of, is_linear, is_transposed, widths

WAYS = ("colwise", "rowwise", "qkv", "heads", "vocabulary", "whole")


def find_plan(model: nn.Module, ranks: int, asked: Mapping[str, str] | None = None) -> dict[str, CutLayer]:
    """The layers to be cut over `ranks`, by name.

    Args:
        model: as one process has it.
        ranks: along tensor.
        asked: by name or pattern of modules one of WAYS, which counts more than what is found; the last match counts.

    Raises:
        UsageError: the heads of an attention, or the widths of what was asked for, cannot be shared by so many ranks;
            a pattern matches nothing; nothing can be cut.
    """
    told = _asked(model, asked or {}, ranks)
    owned = tuple(f"{name}." for name, layer in told.items() if layer is None)  # what is in a whole module is whole
    found = guessed(model, ranks, lambda name: name not in told and not name.startswith(owned))
    found = _agreeing(model, found | {name: layer for name, layer in told.items() if layer is not None})
    if not found:
        shown = first_few([f"{name} ({type(m).__name__})" for name, m in model.named_modules() if name], 8)
        raise UsageError(code="no-layer-to-shard", ranks=ranks, layers=shown or "no layers")
    return found


def cuts_of(model: nn.Module, plan: Mapping[str, CutLayer], world: World) -> dict[str, ShardedParameter]:
    """Of the parameters that are cut, by name, what this rank of `world` (along tensor) holds."""
    found: dict[str, ShardedParameter] = {}
    first = {id(p): name for name, p in model.named_parameters()}
    for name, layer in plan.items():
        module: Any = model.get_submodule(name)
        for leaf, dim, parts in _dims(module, layer):
            parameter = module.get_parameter(leaf)
            found[first[id(parameter)]] = cut_of(parameter.shape, dim, world, parts)
    return found


def _dims(module: Any, layer: CutLayer) -> Iterable[tuple[str, int, tuple[int, ...]]]:
    """(parameter, dimension, parts along it)."""
    if layer.way == "heads":
        third = (module.embed_dim,) * 3
        yield from [("in_proj_weight", 0, third), ("out_proj.weight", 1, ())]
        if module.in_proj_bias is not None:
            yield "in_proj_bias", 0, third
    elif layer.way == "vocabulary":
        yield "weight", 0, ()
    elif layer.way == "rowwise":
        yield "weight", 0 if is_transposed(module) else 1, ()
    else:
        yield "weight", 1 if is_transposed(module) else 0, layer.parts
        if module.bias is not None:
            yield "bias", 0, layer.parts


def _asked(model: nn.Module, asked: Mapping[str, str], ranks: int) -> dict[str, CutLayer | None]:
    """What the task says: by name how a layer is cut, or None: whole."""
    there = {name: module for name, module in model.named_modules() if name}
    told: dict[str, CutLayer | None] = {}
    for pattern, way in asked.items():
        if way not in WAYS:
            raise unknown(f"way to cut {pattern}", way, WAYS)
        names = [name for name in there if fnmatchcase(name, pattern)]
        if not names:
            raise UsageError(code="parallelize-no-module", pattern=pattern, modules=first_few([*there], 20))
        told |= {name: None if way == "whole" else _layer(name, there[name], way, ranks) for name in names}
    return told


def _layer(name: str, module: Any, way: str, ranks: int) -> CutLayer:
    fits = {"heads": type(module) is nn.MultiheadAttention, "vocabulary": type(module) is nn.Embedding}
    if not fits.get(way, is_linear(module)):
        raise UsageError(code="parallelize-way", name=name, kind=type(module).__name__, way=way)
    layer = CutLayer(way, (widths(module)[1] // 3,) * 3 if way == "qkv" else ())
    for leaf, dim, of in _dims(module, layer):
        shape = module.get_parameter(leaf).shape
        if any(width % ranks for width in of or (shape[dim],)):
            raise UsageError(
                code="parallelize-does-not-divide", name=name, leaf=leaf, shape=tuple(shape), ranks=ranks, dim=dim
            )
    return layer


def _agreeing(model: nn.Module, found: Mapping[str, CutLayer]) -> dict[str, CutLayer]:
    """Without layers that share a parameter with one that is not cut, or cut otherwise: it then stays whole in all."""
    owners: dict[int, list[tuple[str, object]]] = {}
    known: dict[str, object] = {}
    for name, layer in found.items():
        for leaf, dim, parts in _dims(model.get_submodule(name), layer):
            known[f"{name}.{leaf}"] = dim, parts
    for full, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append((full, known.get(full)))
    odd = {full for of in owners.values() if len({cut for _, cut in of}) > 1 for full, _ in of}
    return {
        name: layer for name, layer in found.items()
        if not any(f"{name}.{leaf}" in odd for leaf, _, _ in _dims(model.get_submodule(name), layer))
    }  # fmt: skip
