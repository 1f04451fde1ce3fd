"""The plan of tensor parallelism: paceline chooses layers by their shapes, order and names.

A bad plan is slow, never wrong (see `dtensor_mode`), so the rules may guess. If the outputs of a linear layer are the
inputs of the next one, the first is sharded by columns and the second by rows. Queries, keys and values, and the layer
after them, are sharded by heads. Embeddings, and the layer that computes logits, are sharded by words.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.shards import ParameterShard
from paceline.errors import UsageError, first_few, plural, unknown_name_error
from paceline.parallel.layers import is_linear, is_transposed, linear_features
from paceline.rank.world import World

SHARDING_STYLES = ("colwise", "rowwise", "qkv", "heads", "vocabulary", "whole")
ATTENTION_INPUT_PATTERN = re.compile(
    r"(^|[._])(q|k|v|query|key|value|qkv|c_attn|in_proj|query_key_value|[qkv]_?(proj|lin|linear)|to_(q|k|v|qkv)|w[qkv]|attn|Wqkv)$"
)
HEADS = ("num_heads", "n_head", "n_heads", "heads", "nhead", "num_attention_heads", "n_local_heads")
KEY_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_kv_head")

NamedModule = tuple[str, Any]


@dataclass(frozen=True)
class LayerSharding:
    style: str
    """one of WAYS"""
    parts: tuple[int, ...] = ()
    """the widths of the concatenated outputs of a fused layer"""


def find_tensor_parallel_plan(
    model: nn.Module, ranks: int, requested_styles: Mapping[str, str] | None = None
) -> dict[str, LayerSharding]:
    """The sharded layers of the whole `model`, by name, for `ranks` ranks along tensor.

    `requested_styles`: by name or pattern of modules, one of SHARDING_STYLES, which overrides the rules. The last match
    counts.
    """
    chosen = _requested_layers(model, requested_styles or {}, ranks)
    excluded = tuple(f"{name}." for name, layer in chosen.items() if layer is None)  # and all modules inside
    free = [(name, m) for name, m in model.named_modules() if name not in chosen and not name.startswith(excluded)]
    plan = _plan_attention(model, free, ranks)
    plan |= _plan_linear_pairs(free, plan, ranks)
    plan |= _plan_vocabulary(free, plan, ranks)
    plan = _consistent(model, plan | {name: layer for name, layer in chosen.items() if layer is not None})
    if not plan:
        shown = first_few([f"{name} ({type(m).__name__})" for name, m in model.named_modules() if name], 8)
        raise UsageError(code="no-layer-to-shard", ranks=ranks, layers=shown or "no layers")
    return plan


def shards_by_name(model: nn.Module, plan: Mapping[str, LayerSharding], world: World) -> dict[str, ParameterShard]:
    shards: dict[str, ParameterShard] = {}
    first = {id(p): name for name, p in model.named_parameters()}
    for name, layer in plan.items():
        module: Any = model.get_submodule(name)
        for leaf, dim, parts in _dims(module, layer):
            parameter = module.get_parameter(leaf)
            shards[first[id(parameter)]] = even_shard(parameter.shape, dim, world, parts)
    return shards


def even_shard(shape: torch.Size, dim: int, world: World, parts: Sequence[int] = ()) -> ParameterShard:
    """This rank's even shard along dimension `dim`. With several `parts` along it, each of them is sharded."""
    runs: list[tuple[int, int]] = []
    start = 0
    for part in parts or (shape[dim],):
        size = part // world.size
        runs.append((start + world.rank * size, start + (world.rank + 1) * size))
        start += part
    return ParameterShard(shape, dim, tuple(runs))


def _dims(module: Any, layer: LayerSharding) -> Iterable[tuple[str, int, tuple[int, ...]]]:
    """(parameter, dimension, parts along it) of the sharded parameters of a layer."""
    if layer.style == "heads":
        third = (module.embed_dim,) * 3
        yield from [("in_proj_weight", 0, third), ("out_proj.weight", 1, ())]
        if module.in_proj_bias is not None:
            yield "in_proj_bias", 0, third
    elif layer.style == "vocabulary":
        yield "weight", 0, ()
    elif layer.style == "rowwise":
        yield "weight", 0 if is_transposed(module) else 1, ()
    else:
        yield "weight", 1 if is_transposed(module) else 0, layer.parts
        if module.bias is not None:
            yield "bias", 0, layer.parts


# ---- the request of the task --------------------------------------------------------------------------------------


def _requested_layers(model: nn.Module, ways: Mapping[str, str], ranks: int) -> dict[str, LayerSharding | None]:
    modules = {name: module for name, module in model.named_modules() if name}
    layers: dict[str, LayerSharding | None] = {}
    for pattern, way in ways.items():
        if way not in SHARDING_STYLES:
            raise unknown_name_error(f"sharding of {pattern}", way, SHARDING_STYLES)
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            raise UsageError(code="parallelize-no-module", pattern=pattern, modules=first_few([*modules], 20))
        layers |= {name: None if way == "whole" else _asked_layer(name, modules[name], way, ranks) for name in names}
    return layers


def _asked_layer(name: str, module: Any, way: str, ranks: int) -> LayerSharding:
    fits = {"heads": type(module) is nn.MultiheadAttention, "vocabulary": type(module) is nn.Embedding}
    if not fits.get(way, is_linear(module)):
        raise UsageError(code="parallelize-way", name=name, kind=type(module).__name__, way=way)
    layer = LayerSharding(way, (linear_features(module)[1] // 3,) * 3 if way == "qkv" else ())
    for leaf, dim, parts in _dims(module, layer):
        shape = module.get_parameter(leaf).shape
        if any(width % ranks for width in parts or (shape[dim],)):
            raise UsageError(
                code="parallelize-does-not-divide", name=name, leaf=leaf, shape=tuple(shape), ranks=ranks, dim=dim
            )
    return layer


def _consistent(model: nn.Module, plan: Mapping[str, LayerSharding]) -> dict[str, LayerSharding]:
    """The plan without layers that have a parameter in common with a layer that is not sharded in the same way."""
    sharded_dims = {
        f"{name}.{leaf}": (dim, parts)
        for name, layer in plan.items()
        for leaf, dim, parts in _dims(model.get_submodule(name), layer)
    }
    owners: dict[int, list[str]] = {}
    for full, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(full)
    odd = {full for names in owners.values() if len({sharded_dims.get(name) for name in names}) > 1 for full in names}
    return {
        name: layer for name, layer in plan.items()
        if not any(f"{name}.{leaf}" in odd for leaf, _, _ in _dims(model.get_submodule(name), layer))
    }  # fmt: skip


# ---- the rules ---------------------------------------------------------------------------------------------------


def _plan_attention(model: nn.Module, free: Sequence[NamedModule], ranks: int) -> dict[str, LayerSharding]:
    plan: dict[str, LayerSharding] = {}
    for name, module in free:
        if type(module) is nn.MultiheadAttention and _is_plain(module):
            _check_heads(name, module, module.num_heads, ranks)
            plan[name] = LayerSharding("heads")
    linears = [(name, module) for name, module in free if is_linear(module)]
    at = 0
    while at < len(linears):
        group: list[NamedModule] = []
        while at < len(linears) and ATTENTION_INPUT_PATTERN.search(linears[at][0]):
            if group and not _are_in_neighbouring_modules(group[-1][0], linears[at][0]):
                break
            group.append(linears[at])
            at += 1
        if not group:
            at += 1
            continue
        last = linears[at] if at < len(linears) and _are_in_neighbouring_modules(group[-1][0], linears[at][0]) else None
        projections = None if last is None else _plan_projections(group, last)
        if last is None or projections is None or any(name.startswith(f"{n}.") for n in plan for name, _ in group):
            continue
        owner_name = group[0][0].rpartition(".")[0]
        owner = model.get_submodule(owner_name)
        for attributes in (HEADS, KEY_HEADS):
            if (number := _find_head_count(owner, attributes)) is not None:
                _check_heads(owner_name, owner, number, ranks)
        divides = all(width % ranks == 0 for layer in projections.values() for width in layer.parts)
        if divides and _fits(group, last, ranks):
            plan |= projections | {last[0]: LayerSharding("rowwise")}
            at += 1
    return plan


def _plan_projections(group: Sequence[NamedModule], last: NamedModule) -> dict[str, LayerSharding] | None:
    """How queries, keys and values are sharded; None if the next layer does not take their outputs."""
    width = linear_features(last[1])[0]
    if len(group) == 1:
        outputs = linear_features(group[0][1])[1]
        if outputs <= width or (outputs - width) % 2:
            return None
        other = (outputs - width) // 2
        return {group[0][0]: LayerSharding("qkv", (width, other, other))}
    if max(linear_features(module)[1] for _, module in group) != width:
        return None
    return {name: LayerSharding("colwise") for name, _ in group}


def _plan_linear_pairs(
    free: Sequence[NamedModule], taken: Mapping[str, LayerSharding], ranks: int
) -> dict[str, LayerSharding]:
    plan: dict[str, LayerSharding] = {}
    inside = tuple(f"{name}." for name, layer in taken.items() if layer.style == "heads")
    linears = [(n, m) for n, m in free if is_linear(m) and n not in taken and not n.startswith(inside)]
    at = 0
    while at + 1 < len(linears):
        group, (inputs, outputs) = [linears[at]], linear_features(linears[at][1])
        while (  # a gate next to its values
            inputs != outputs
            and at + len(group) + 1 < len(linears)
            and linear_features(linears[at + len(group)][1]) == (inputs, outputs)
            and _are_in_neighbouring_modules(group[0][0], linears[at + len(group)][0])
        ):
            group.append(linears[at + len(group)])
        last = linears[at + len(group)]
        inner = linear_features(last[1])[0]
        fits = _are_in_neighbouring_modules(group[0][0], last[0]) and _fits(group, last, ranks)
        if fits and outputs == inner:
            plan |= {name: LayerSharding("colwise") for name, _ in group} | {last[0]: LayerSharding("rowwise")}
            at += len(group) + 1
        elif fits and outputs == 2 * inner and len(group) == 1:  # a gate and its values in one layer
            plan |= {group[0][0]: LayerSharding("qkv", (inner, inner)), last[0]: LayerSharding("rowwise")}
            at += 2
        else:
            at += 1
    return plan


def _plan_vocabulary(
    free: Sequence[NamedModule], taken: Mapping[str, LayerSharding], ranks: int
) -> dict[str, LayerSharding]:
    plan: dict[str, LayerSharding] = {}
    vocab_sizes: set[int] = set()
    for name, module in free:
        if type(module) is nn.Embedding:
            usual = module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)
            large = module.num_embeddings >= module.embedding_dim  # a small table is probably one of positions
            if usual and large and module.num_embeddings % ranks == 0:
                plan[name] = LayerSharding("vocabulary")
                vocab_sizes.add(module.num_embeddings)
        elif is_linear(module) and name not in taken and linear_features(module)[1] in vocab_sizes:
            plan[name] = LayerSharding("colwise")
    return plan


def _is_plain(module: nn.MultiheadAttention) -> bool:
    same_width: Any = module.in_proj_weight
    return same_width is not None and module.bias_k is None and not module.add_zero_attn


def _check_heads(name: str, module: nn.Module, number: int, ranks: int) -> None:
    if number % ranks:
        fitting = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
        raise UsageError(
            code="heads-do-not-divide", ranks=ranks, name=name, kind=type(module).__name__,
            heads=plural(number, "head"), fitting=fitting,
        )  # fmt: skip


def _find_head_count(module: nn.Module, names: Sequence[str]) -> int | None:
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _are_in_neighbouring_modules(a: str, b: str) -> bool:
    """Whether two layers are in the same module, or in two modules of the same module other than the model."""
    first, second = a.split(".")[:-1], b.split(".")[:-1]
    return first == second or (
        len(first) > 1 and first[:-1] == second[: len(first) - 1] and len(second) in (len(first), len(first) - 1)
    )


def _fits(group: Sequence[NamedModule], last: NamedModule, ranks: int) -> bool:
    return all(
        size % ranks == 0
        for size in [*(linear_features(module)[1] for _, module in group), linear_features(last[1])[0]]
    )
