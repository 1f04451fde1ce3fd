"""Attention and dropout of a model that ranks share: each computes its heads or rows, with one process's noise."""

from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from paceline.parallel.exchange import EVERYWHERE, SUMMANDS, everywhere, share_along, without_gaps


def dropout(input: DTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As `F.dropout` on one process: the mask is drawn whole, and each rank takes its share."""
    if not training or p == 0.0:
        return input
    if input.placements[0].is_partial():
        input = input.redistribute(placements=EVERYWHERE)
    drawn = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device=input.device)
    noise = drawn.bernoulli_(1 - p) if p < 1 else drawn.zero_()
    noise = noise.div_(1 - p) if p < 1 else noise
    mask = everywhere(noise, input.device_mesh).redistribute(placements=input.placements)
    return input.mul_(mask) if inplace else input * mask


def attention(
    query: DTensor,
    key: DTensor,
    value: DTensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of (..., heads, length, width): each rank computes its heads.

    Where they do not divide, and it has a part of the queries, it computes these.
    """
    mesh, heads, length = query.device_mesh, query.ndim - 3, query.ndim - 2
    shared = heads >= 0 and all(one.shape[heads] % mesh.size() == 0 for one in (query, key, value))
    rows = not shared and query.placements[0].is_shard(length) and query.shape[length] % mesh.size() == 0
    place: list[Any] = [Shard(heads)] if shared else [Shard(length)] if rows else EVERYWHERE
    q, k, v = (
        _for_attention(one, place if one is query or not rows else EVERYWHERE, place) for one in (query, key, value)
    )
    mask = attn_mask
    if rows and is_causal:  # of these rows
        seen = torch.ones(query.shape[length], key.shape[length], dtype=torch.bool, device=q.device).tril()
        mask, is_causal = everywhere(seen, mesh), False
    if isinstance(mask, DTensor):
        of = mask.ndim - 2 if rows else mask.ndim - 3  # the dimension of the mask that is shared with it
        apart = (shared or rows) and of >= 0 and mask.shape[of] == query.shape[length if rows else heads]
        at: list[Any] = [Shard(of)] if apart else EVERYWHERE
        back: list[Any] = SUMMANDS if place != EVERYWHERE and not apart else at
        mask = mask.redistribute(placements=at).to_local(grad_placements=back)
    if dropout_p == 0.0:
        found = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    else:
        found = _attention_with_dropout(q, k, v, mask, dropout_p, is_causal, scale, mesh, place)
    return DTensor.from_local(found, mesh, place)


def _for_attention(one: DTensor, place: list[Any], of_queries: list[Any]) -> Tensor:
    if place[0].is_shard():
        return share_along(one, place[0].dim)
    back = EVERYWHERE if of_queries == EVERYWHERE else SUMMANDS
    return without_gaps(one.redistribute(placements=EVERYWHERE).to_local(grad_placements=back))


def _attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, is_causal: bool, scale: float | None,
    mesh: DeviceMesh, place: list[Any],
) -> Tensor:  # fmt: skip
    """By its definition, as torch computes it with dropout: that is drawn for all heads."""
    if k.ndim == 4 and k.shape[1] != q.shape[1]:
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    root = sqrt(1 / sqrt(q.shape[-1]) if scale is None else scale)
    scores = (q * root) @ (k * root).transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    kept = dropout(DTensor.from_local(weights, mesh, place), p)
    assert isinstance(kept, DTensor)
    return kept.to_local() @ v
