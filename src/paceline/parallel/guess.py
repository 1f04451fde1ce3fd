"""Guesses which layers of a model make up a pair to be cut: by their shapes, their order and their names."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from paceline.errors import UsageError, plural
from paceline.parallel.layers import is_linear, widths

INTO_ATTENTION = re.compile(
    r"(^|[._])(q|k|v|query|key|value|qkv|c_attn|in_proj|query_key_value|[qkv]_?(proj|lin|linear)|to_(q|k|v|qkv)|w[qkv]|attn|Wqkv)$"
)
HEADS = ("num_heads", "n_head", "n_heads", "heads", "nhead", "num_attention_heads", "n_local_heads")
KEY_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_kv_head")

Free = Callable[[str], bool]
"""(name of a module): whether the task says nothing of it"""


@dataclass(frozen=True)
class CutLayer:
    """A layer that is cut."""

    way: str
    """of WAYS"""
    parts: tuple[int, ...] = ()
    """the widths of what a fused layer gives side by side"""


def guessed(model: nn.Module, ranks: int, free: Free) -> dict[str, CutLayer]:
    """The layers that can be cut over `ranks`, by name, of those that are `free`.

    Raises:
        UsageError: the heads of an attention cannot be shared by so many ranks.
    """
    found = _attention(model, ranks, free)
    found |= _pairs(model, found, ranks, free)
    return found | _vocabulary(model, found, ranks, free)


def _attention(model: nn.Module, ranks: int, free: Free) -> dict[str, CutLayer]:
    found: dict[str, CutLayer] = {}
    linears = [(name, module) for name, module in model.named_modules() if is_linear(module) and free(name)]
    for name, module in model.named_modules():
        if type(module) is nn.MultiheadAttention and _is_plain(module) and free(name):
            _check_heads(name, module, module.num_heads, ranks)
            found[name] = CutLayer("heads")
    at = 0
    while at < len(linears):
        group: list[tuple[str, nn.Module]] = []
        while at < len(linears) and INTO_ATTENTION.search(linears[at][0]):
            if group and not _near(group[-1][0], linears[at][0]):
                break
            group.append(linears[at])
            at += 1
        if not group:
            at += 1
            continue
        last = linears[at] if at < len(linears) and _near(group[-1][0], linears[at][0]) else None
        fused = None if last is None else _fused(group, last)
        if last is None or fused is None or any(layer[0].startswith(f"{own}.") for own in found for layer in group):
            continue
        owner = model.get_submodule(group[0][0].rpartition(".")[0])
        for attributes in (HEADS, KEY_HEADS):
            if (number := _number(owner, attributes)) is not None:
                _check_heads(group[0][0].rpartition(".")[0], owner, number, ranks)
        if all(width % ranks == 0 for layer in fused.values() for width in layer.parts) and _fits(group, last, ranks):
            found |= fused | {last[0]: CutLayer("rowwise")}
            at += 1
    return found


def _fused(group: Sequence[tuple[str, nn.Module]], last: tuple[str, nn.Module]) -> dict[str, CutLayer] | None:
    """How queries, keys and values are cut; None if what follows does not take what they give."""
    width = widths(last[1])[0]
    if len(group) == 1:
        outputs = widths(group[0][1])[1]
        if outputs <= width or (outputs - width) % 2:
            return None
        other = (outputs - width) // 2
        return {group[0][0]: CutLayer("qkv", (width, other, other))}
    if max(widths(module)[1] for _, module in group) != width:
        return None
    return {name: CutLayer("colwise") for name, _ in group}


def _pairs(model: nn.Module, taken: Mapping[str, CutLayer], ranks: int, free: Free) -> dict[str, CutLayer]:
    found: dict[str, CutLayer] = {}
    own = tuple(f"{name}." for name, layer in taken.items() if layer.way == "heads")
    linears = [
        (name, module) for name, module in model.named_modules()
        if is_linear(module) and free(name) and name not in taken and not name.startswith(own)
    ]  # fmt: skip
    at = 0
    while at + 1 < len(linears):
        group, (inputs, outputs) = [linears[at]], widths(linears[at][1])
        while (  # a gate beside what it gates
            inputs != outputs
            and at + len(group) + 1 < len(linears)
            and widths(linears[at + len(group)][1]) == (inputs, outputs)
            and _near(group[0][0], linears[at + len(group)][0])
        ):
            group.append(linears[at + len(group)])
        last = linears[at + len(group)]
        if not _near(group[0][0], last[0]) or not _fits(group, last, ranks):
            at += 1
            continue
        inner = widths(last[1])[0]
        if outputs == inner:
            found |= {name: CutLayer("colwise") for name, _ in group} | {last[0]: CutLayer("rowwise")}
            at += len(group) + 1
        elif outputs == 2 * inner and len(group) == 1:  # a gate and what it gates in one
            found |= {group[0][0]: CutLayer("qkv", (inner, inner)), last[0]: CutLayer("rowwise")}
            at += 2
        else:
            at += 1
    return found


def _vocabulary(model: nn.Module, taken: Mapping[str, CutLayer], ranks: int, free: Free) -> dict[str, CutLayer]:
    """Embeddings, and layers that give a score for each word of one of them."""
    found: dict[str, CutLayer] = {}
    words: set[int] = set()
    for name, module in model.named_modules():
        if type(module) is nn.Embedding and free(name):
            usual = module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)
            large = module.num_embeddings >= module.embedding_dim  # else a table of a few rows, of positions say
            if usual and large and module.num_embeddings % ranks == 0:
                found[name] = CutLayer("vocabulary")
                words.add(module.num_embeddings)
        elif is_linear(module) and free(name) and name not in taken and widths(module)[1] in words:
            found[name] = CutLayer("colwise")
    return found


def _is_plain(module: Any) -> bool:
    same = module.in_proj_weight is not None  # queries, keys and values of one width
    return same and module.bias_k is None and not module.add_zero_attn


def _check_heads(name: str, module: nn.Module, number: int, ranks: int) -> None:
    if number % ranks:
        fitting = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
        raise UsageError(
            code="heads-do-not-divide", ranks=ranks, name=name, kind=type(module).__name__,
            heads=plural(number, "head"), fitting=fitting,
        )  # fmt: skip


def _number(module: nn.Module, names: Sequence[str]) -> int | None:
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _near(a: str, b: str) -> bool:
    """Whether two layers are in one module, or in two modules of one, which is not the model."""
    one, other = a.split(".")[:-1], b.split(".")[:-1]
    return one == other or (
        len(one) > 1 and one[:-1] == other[: len(one) - 1] and len(other) in (len(one), len(one) - 1)
    )


def _fits(group: Sequence[tuple[str, nn.Module]], last: tuple[str, nn.Module], ranks: int) -> bool:
    sizes = [widths(module)[1] for _, module in group] + [widths(last[1])[0]]
    return all(size % ranks == 0 for size in sizes)
