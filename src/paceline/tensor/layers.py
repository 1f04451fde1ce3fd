"""How a layer computes with its part: column-wise, row-wise, by heads, by the words of a vocabulary.

Megatron's pairs (Shoeybi et al. 2019): a column-wise layer takes the whole input and gives a share of its outputs; a
row-wise one takes such a share and gives its part of the whole output, which is added up over ranks. What is inside is
plain tensors and torch's kernels; DTensor moves what has to move, forward and backward.
"""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.checkpoint.shards import ShardedParameter
from paceline.compute.rules import subclassed
from paceline.rank.world import World
from paceline.tensor.attention import attention, dropout
from paceline.tensor.exchange import everywhere
from paceline.tensor.transfers import Local
from paceline.tensor.view import Fused, made_whole


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer: torch's, or Hugging Face's Conv1D, whose weight lies the other way round."""
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether its weight is (inputs, outputs)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def widths(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer as one process has it."""
    weight: Tensor = module.weight  # pyright: ignore[reportAssignmentType]
    inputs, outputs = weight.shape if is_transposed(module) else weight.shape[::-1]
    return inputs, outputs


def cut_of(shape: torch.Size, dim: int, world: World, parts: Sequence[int] = ()) -> ShardedParameter:
    """This rank's even share of dimension `dim`; of each of `parts` that lie along it, where there are several."""
    runs: list[tuple[int, int]] = []
    start = 0
    for part in parts or (shape[dim],):
        share = part // world.size
        runs.append((start + world.rank * share, start + (world.rank + 1) * share))
        start += part
    return ShardedParameter(shape, dim, tuple(runs))


def _linear(module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    weight = module.weight.T if is_transposed(module) else module.weight
    return F.linear(x, weight, bias)


def apart(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that `View` does not listen to."""

    def quiet(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            return forward(self, *args, **kwargs)

    return quiet


def colwise(module: nn.Module, local: Local, parts: Sequence[int], ranks: int) -> None:
    """Let a linear layer give its share of the outputs, of each of `parts` where it is a fused one."""

    def forward(self: Any, x: Any) -> Any:
        taken = local.taken(x)
        with local.kept_apart(x, taken):
            y = _linear(self, taken, self.bias)
        if len(parts) < 2:
            return local.shared(y)
        return Fused.of([local.shared(part) for part in y.split([width // ranks for width in parts], -1)])

    subclassed(module, forward=apart(forward))


def rowwise(module: nn.Module, local: Local) -> None:
    """Let a linear layer give its part of the output, and add up all ranks'; the bias counts once."""

    def forward(self: Any, x: Any) -> Tensor:
        return local.summed(_linear(self, local.share(x), None), self.bias)

    subclassed(module, forward=apart(forward))


def vocabulary(module: nn.Module, local: Local, first: int) -> None:
    """Let an embedding look up the words that it has, from `first` on, and add up over ranks."""

    def forward(self: Any, words: Tensor) -> Tensor:
        count = len(self.weight)
        own = made_whole(words) - first
        there = (own >= 0) & (own < count)
        padding: int | None = self.padding_idx
        padding = padding - first if padding is not None and first <= padding < first + count else None
        found = F.embedding(own.clamp(0, count - 1), self.weight, padding)
        return local.summed(found * there.unsqueeze(-1).to(found.dtype))

    subclassed(module, forward=apart(forward))


def by_heads(module: nn.MultiheadAttention, local: Local, ranks: int) -> None:
    """Let nn.MultiheadAttention compute this rank's heads."""

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        q, k, v = _projected(self, local, query, key, value)
        mask = mask_of_heads(attn_mask, key_padding_mask, q.dtype, self.num_heads)
        p = self.dropout if self.training else 0.0
        qs, ks, vs = (local.shared(one, 1) for one in (q, k, v))
        weights = None
        if need_weights:
            scores = (q * sqrt(1 / q.shape[-1])) @ k.transpose(-2, -1)
            if mask is not None:
                scores = scores + (local.share(mask, 1) if ranks > 1 and mask.shape[1] > 1 else mask)
            weights = dropout(local.shared(scores.softmax(-1), 1), p)
            assert isinstance(weights, DTensor)
            y = weights.to_local() @ v
        else:
            seen = None if mask is None else everywhere(mask, local.mesh)
            y = attention(qs, ks, vs, seen, p).to_local()  # pyright: ignore[reportAttributeAccessIssue]
        # (L, B, E), as torch lays it out: a dropout behind it draws in the order of memory
        y = local.summed(F.linear(y.permute(2, 0, 1, 3).flatten(2), self.out_proj.weight), self.out_proj.bias)
        if weights is not None:
            weights = made_whole(weights.mean(1) if average_attn_weights else weights)
        if query.ndim == 2:
            return y.squeeze(1), None if weights is None else weights.squeeze(0)
        return y.transpose(0, 1) if self.batch_first else y, weights

    subclassed(module, forward=apart(forward))


def _projected(module: Any, local: Local, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """(B, this rank's heads, L, width) each."""
    weights = module.in_proj_weight.chunk(3)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    found: list[Tensor] = []
    for one, weight, bias in zip((query, key, value), weights, biases, strict=True):
        taken = local.taken(one)  # self-attention: once
        with local.kept_apart(one, taken):
            y = F.linear(taken, weight, bias)
        y = y.unsqueeze(0) if y.ndim == 2 else y if module.batch_first else y.transpose(0, 1)
        found.append(y.unflatten(-1, (-1, module.head_dim)).transpose(1, 2))
    return tuple(found)


def mask_of_heads(mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype, heads: int) -> Tensor | None:
    """To be added to the scores (B or 1, heads or 1, L, S) of all heads, from what nn.MultiheadAttention takes."""

    def added(one: Tensor) -> Tensor:
        one = made_whole(one)
        return torch.zeros_like(one, dtype=dtype).masked_fill_(one, float("-inf")) if one.dtype == torch.bool else one

    found = None if mask is None else added(mask)
    if found is not None:
        found = found[None, None] if found.ndim == 2 else found.unflatten(0, (-1, heads))
    if padding is None:
        return found
    columns = added(padding if padding.ndim == 2 else padding[None])[:, None, None, :]
    return columns if found is None else found + columns
