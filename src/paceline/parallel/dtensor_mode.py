"""The forward of a model on a mesh: DTensors between sharded layers.

A column-wise layer computes a shard of its outputs, and returns a DTensor. For the model's code this is a tensor of
the whole shape. So code without knowledge of ranks (`view(B, T, heads, C // heads)`, a softmax, a mask) computes the
same as on one process. If an operation needs more than the shard, torch gathers it: a bad plan is only slow.

`DTensorMode` handles each function that the model's forward calls. It treats plain tensors among DTensors as
replicated. Random numbers are drawn for the whole tensor, as on one process, and each rank takes its shard.
Attention is computed by heads. A fused projection of queries, keys and values is split without communication.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from math import prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from paceline.checkpoint.shards import ParameterShard
from paceline.parallel.dtensor import (
    PARTIAL,
    REPLICATED,
    FusedProjectionOutput,
    full_tensor,
    gather_and_concat,
    replicated_from_local,
    reshard_to_local,
    with_contiguous_gradient,
)


def dropout(input: DTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As `F.dropout` on one process: each rank draws the whole mask, and takes its shard."""
    if not training or p == 0.0:
        return input
    if input.placements[0].is_partial():
        input = input.redistribute(placements=REPLICATED)
    drawn = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device=input.device)
    noise = drawn.bernoulli_(1 - p).div_(1 - p) if p < 1 else drawn.zero_()
    mask = replicated_from_local(noise, input.device_mesh).redistribute(placements=input.placements)
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

    If the heads do not divide, and the rank has a part of the queries, it computes the rows of these queries.
    """
    mesh, heads, length = query.device_mesh, query.ndim - 3, query.ndim - 2
    by_heads = heads >= 0 and all(tensor.shape[heads] % mesh.size() == 0 for tensor in (query, key, value))
    by_rows = not by_heads and query.placements[0].is_shard(length) and query.shape[length] % mesh.size() == 0
    placement: list[Any] = [Shard(heads)] if by_heads else [Shard(length)] if by_rows else REPLICATED
    q = _attention_input(query, placement, placement)
    k, v = (_attention_input(tensor, REPLICATED if by_rows else placement, placement) for tensor in (key, value))
    mask = attn_mask
    if by_rows and is_causal:  # only the mask of these rows
        causal_mask = torch.ones(query.shape[length], key.shape[length], dtype=torch.bool, device=q.device).tril()
        mask, is_causal = replicated_from_local(causal_mask, mesh), False
    if isinstance(mask, DTensor):
        dim = mask.ndim - 2 if by_rows else mask.ndim - 3  # the dimension of the mask that is sharded with it
        is_sharded = (by_heads or by_rows) and dim >= 0 and mask.shape[dim] == query.shape[length if by_rows else heads]
        of_mask: list[Any] = [Shard(dim)] if is_sharded else REPLICATED
        of_gradient = PARTIAL if placement != REPLICATED and not is_sharded else of_mask
        mask = mask.redistribute(placements=of_mask).to_local(grad_placements=of_gradient)
    if dropout_p == 0.0:
        outputs = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    else:
        outputs = _attention_with_dropout(q, k, v, mask, dropout_p, is_causal, scale, mesh, placement)
    return DTensor.from_local(outputs, mesh, placement)


def _attention_input(tensor: DTensor, placement: list[Any], of_queries: list[Any]) -> Tensor:
    if placement[0].is_shard():
        return reshard_to_local(tensor, placement[0].dim)
    of_gradient = REPLICATED if of_queries == REPLICATED else PARTIAL
    return with_contiguous_gradient(tensor.redistribute(placements=REPLICATED).to_local(grad_placements=of_gradient))


def _attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, is_causal: bool, scale: float | None,
    mesh: DeviceMesh, placement: list[Any],
) -> Tensor:  # fmt: skip
    """Attention by its definition, as torch computes it with dropout: the noise is drawn for all heads."""
    if k.ndim == 4 and k.shape[1] != q.shape[1]:
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    root = sqrt(1 / sqrt(q.shape[-1]) if scale is None else scale)
    scores = (q * root) @ (k * root).transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    dropped = dropout(DTensor.from_local(weights, mesh, placement), p)
    assert isinstance(dropped, DTensor)
    return dropped.to_local() @ v


class DTensorMode(TorchFunctionMode):
    def __init__(self, mesh: DeviceMesh, shards: Mapping[str, ParameterShard], model: nn.Module) -> None:
        super().__init__()
        self._mesh = mesh
        # weak: fsdp replaces these tensors, and releases them
        self._shards = {id(p): (weakref.ref(p), shards[name]) for name, p in model.named_parameters() if name in shards}
        self.used_elsewhere: set[int] = set()
        """parameters, by identity, that code outside their layers has used"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(
            isinstance(leaf, (DTensor, FusedProjectionOutput)) or self._is_sharded(leaf)
            for leaf in _leaves((*args, *kwargs.values()))
        ):
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__" and isinstance(args[0], FusedProjectionOutput):
            return func(*args, **kwargs)  # e.g. its shape
        if func in _SPLITS_FUSED and isinstance(args[0], FusedProjectionOutput):
            parts = _split_fused(func, *args, **kwargs)
            if parts is not None:
                return parts
        if func in _CONCATENATES:  # caches of keys begin with an empty tensor of one dimension
            args = ([tensor for tensor in args[0] if tensor.shape != (0,)], *args[1:])
            if len(args[0]) == 1:
                return args[0][0]
        args, kwargs = tree_map(self._as_dtensor, args), tree_map(self._as_dtensor, kwargs)
        if func in _DROPOUT:
            return dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        if func in _DRAWS_IN_PLACE:
            drawn = func(full_tensor(args[0]).clone(), *args[1:], **kwargs)
            return args[0].copy_(replicated_from_local(drawn, self._mesh))
        if func in _NEEDS_WHOLE:
            args, kwargs = tree_map(full_tensor, args), tree_map(full_tensor, kwargs)
        return func(*args, **kwargs)

    def _is_sharded(self, value: Any) -> bool:
        return id(value) in self._shards and self._shards[id(value)][0]() is value

    def _as_dtensor(self, value: Any) -> Any:
        if isinstance(value, DTensor) or not isinstance(value, Tensor):
            return value
        if isinstance(value, FusedProjectionOutput):
            return gather_and_concat(value.parts, -1)
        if not self._is_sharded(value):
            return replicated_from_local(value, self._mesh)
        self.used_elsewhere.add(id(value))
        shard = self._shards[id(value)][1]
        runs = value.split([stop - start for start, stop in shard.ranges], shard.dim)
        parts = [DTensor.from_local(run, self._mesh, [Shard(shard.dim)]) for run in runs]
        return parts[0] if len(parts) == 1 else gather_and_concat(parts, shard.dim)


def _leaves(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _split_fused(
    func: Any, fused: FusedProjectionOutput, *args: Any, **kwargs: Any
) -> Tensor | Sequence[Tensor] | None:
    """The parts of a fused projection, if `func` splits it exactly so; else None."""
    parts, widths = fused.parts, [part.shape[-1] for part in fused.parts]
    last = fused.ndim - 1
    if func in _SPLITS:
        dim = kwargs.pop("dim", args[1] if len(args) > 1 else 0)
        size = [*args, *kwargs.values()][0]
        equal = len(parts) if func in _CHUNKS else widths[0]
        fits = size == equal and len(set(widths)) == 1 if isinstance(size, int) else [*(size or ())] == widths
        return tuple(parts) if fits and dim in (-1, last) else None
    if func is Tensor.unflatten:
        dim, sizes = [*args, *kwargs.values()]
        shape = [*fused.shape[:-1], *sizes] if dim in (-1, last) else []
    else:
        shape = [*args[0]] if args and isinstance(args[0], (tuple, list)) else [*args]
    if -1 in shape:
        shape[shape.index(-1)] = prod(fused.shape) // prod(size for size in shape if size != -1)
    if shape[:last] != [*fused.shape[:-1]] or len(set(widths)) > 1 or shape[last : last + 1] != [len(parts)]:
        return None
    return torch.stack([part.reshape(shape[:last] + shape[last + 1 :]) for part in parts], last)


_CHUNKS = {torch.chunk, Tensor.chunk}
_SPLITS = {torch.split, Tensor.split, *_CHUNKS}
_SPLITS_FUSED = {*_SPLITS, Tensor.unflatten, Tensor.view, Tensor.reshape, torch.reshape}
_CONCATENATES = {torch.cat, torch.concat, torch.concatenate}
_DROPOUT = {F.dropout, torch.dropout}
_DRAWS_IN_PLACE = {Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_}
_NEEDS_WHOLE = {  # each rank computes the whole: random numbers, and results that are not tensors
    torch.rand_like, torch.randn_like, torch.bernoulli, Tensor.bernoulli, torch.multinomial, F.alpha_dropout,
    F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.rrelu, F.gumbel_softmax, Tensor.item,
    Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__,
}  # fmt: skip
