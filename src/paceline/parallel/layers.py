"""The forward of a sharded layer: column-wise, row-wise, by heads, or by the words of a vocabulary.

Pairs of layers as in Megatron (Shoeybi et al. 2019): a column-wise layer takes the whole input and computes a shard of
its outputs. A row-wise layer takes this shard and computes a summand of the whole output, which is summed over ranks.
A layer computes with plain tensors and torch's kernels. DTensor communicates, forward and backward.
"""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.compute.forward import assign_dynamic_subclass
from paceline.parallel.dtensor import FusedProjectionOutput, LayerCommunication, full_tensor, replicated_from_local
from paceline.parallel.dtensor_mode import attention, dropout


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether its weight is (inputs, outputs)."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.")


def _weight(module: Any) -> Tensor:
    """(outputs, inputs)."""
    return module.weight.T if is_transposed(module) else module.weight


def linear_features(module: nn.Module) -> tuple[int, int]:
    outputs, inputs = _weight(module).shape
    return inputs, outputs


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of `module`. `DTensorMode` does not handle the functions in it."""

    def hidden(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            return forward(self, *args, **kwargs)

    assign_dynamic_subclass(module, forward=hidden)


def shard_colwise(module: nn.Module, comm: LayerCommunication, parts: Sequence[int], ranks: int) -> None:
    """Let a linear layer compute its shard of the outputs. A fused layer computes its shard of each of `parts`."""

    def forward(self: Any, x: Any) -> Any:
        y = comm.linear(x, _weight(self), self.bias)
        if len(parts) < 2:
            return comm.wrap_shard(y)
        return FusedProjectionOutput.from_parts(
            [comm.wrap_shard(part) for part in y.split([width // ranks for width in parts], -1)]
        )

    replace_forward(module, forward)


def shard_rowwise(module: nn.Module, comm: LayerCommunication) -> None:
    def forward(self: Any, x: Any) -> Tensor:
        return comm.reduce_output(F.linear(comm.shard_input(x), _weight(self)), self.bias)

    replace_forward(module, forward)


def shard_vocabulary(module: nn.Module, comm: LayerCommunication, first: int) -> None:
    def forward(self: Any, indices: Tensor) -> Tensor:
        count = len(self.weight)
        local = full_tensor(indices) - first
        is_local = (local >= 0) & (local < count)
        padding: int | None = self.padding_idx
        padding = padding - first if padding is not None and first <= padding < first + count else None
        vectors = F.embedding(local.clamp(0, count - 1), self.weight, padding)
        return comm.reduce_output(vectors * is_local.unsqueeze(-1).to(vectors.dtype))

    replace_forward(module, forward)


def shard_attention_heads(module: nn.MultiheadAttention, comm: LayerCommunication, ranks: int) -> None:
    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        q, k, v = _projected(self, comm, query, key, value)
        mask = merge_attention_masks(attn_mask, key_padding_mask, q.dtype, self.num_heads)
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * sqrt(1 / q.shape[-1])) @ k.transpose(-2, -1)
            if mask is not None:
                scores = scores + (comm.shard_input(mask, 1) if ranks > 1 and mask.shape[1] > 1 else mask)
            weights = dropout(comm.wrap_shard(scores.softmax(-1), 1), p)
            assert isinstance(weights, DTensor)
            y: Any = weights.to_local() @ v
        else:
            mask_dtensor = None if mask is None else replicated_from_local(mask, comm.mesh)
            query_heads, key_heads, value_heads = (comm.wrap_shard(tensor, 1) for tensor in (q, k, v))
            y = attention(query_heads, key_heads, value_heads, mask_dtensor, p)
            y = y.to_local()
        # (L, B, E), as torch lays it out: a dropout after it draws in the order of memory
        y = comm.reduce_output(F.linear(y.permute(2, 0, 1, 3).flatten(2), self.out_proj.weight), self.out_proj.bias)
        if weights is not None:
            weights = full_tensor(weights.mean(1) if average_attn_weights else weights)
        if query.ndim == 2:
            return y.squeeze(1), None if weights is None else weights.squeeze(0)
        return y.transpose(0, 1) if self.batch_first else y, weights

    replace_forward(module, forward)


def _projected(module: Any, comm: LayerCommunication, *inputs: Tensor) -> list[Tensor]:
    """Queries, keys and values, each (B, this rank's heads, L, width)."""
    projected: list[Tensor] = []
    for x, weight, bias in zip(inputs, *split_qkv_parameters(module), strict=True):
        y = comm.linear(x, weight, bias)
        y = y.unsqueeze(0) if y.ndim == 2 else y if module.batch_first else y.transpose(0, 1)
        projected.append(y.unflatten(-1, (-1, module.head_dim)).transpose(1, 2))
    return projected


def split_qkv_parameters(module: Any) -> tuple[Sequence[Tensor], Sequence[Any]]:
    """The weights and biases of queries, keys and values of an nn.MultiheadAttention; a bias may be None."""
    bias = module.in_proj_bias
    return module.in_proj_weight.chunk(3), [None] * 3 if bias is None else bias.chunk(3)


def merge_attention_masks(mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype, heads: int) -> Tensor | None:
    """The summand of the scores of all heads, (B or 1, heads or 1, L, S), from masks of nn.MultiheadAttention."""

    def as_summand(mask: Tensor) -> Tensor:
        mask = full_tensor(mask)
        if mask.dtype != torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))

    if mask is not None:
        mask = as_summand(mask)
        mask = mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (-1, heads))
    if padding is None:
        return mask
    columns = as_summand(padding if padding.ndim == 2 else padding[None])[:, None, None, :]
    return columns if mask is None else mask + columns
