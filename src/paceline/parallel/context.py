"""Context parallelism: each rank computes its part of every sequence, from the first layer to the logits of the last.

The model's code sees whole tensors (see `dtensor_mode`). A rank takes its positions of a sequence at an embedding of
words (B, T) or a linear layer of (B, T, C). Position-wise layers are computed with plain tensors, for these positions
only. Attention needs all positions: ranks switch from sharding positions to sharding heads, and back (Ulysses, Jacobs
et al. 2023). If the number of ranks does not divide the heads, each rank computes its rows with all keys and values.

Weights are whole on every rank. Their gradients are summed along context in each backward.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

from paceline.collectives.control import raise_on_all_ranks
from paceline.collectives.replicate import broadcast_module
from paceline.errors import UsageError, plural
from paceline.parallel.dtensor import (
    PARTIAL,
    REPLICATED,
    full_tensor,
    replicated_from_local,
    reshard_to_local,
    with_contiguous_gradient,
)
from paceline.parallel.dtensor_mode import DTensorMode, attention
from paceline.parallel.layers import is_transposed, merge_attention_masks, replace_forward, split_qkv_parameters
from paceline.parallel.tensor import check_same_loss, run_forwards_in_mode
from paceline.rank.world import World


def apply_context_parallel(model: nn.Module, world: World, probe: Callable[[], float]) -> list[str]:
    """Split every sequence of `model` over the ranks along `context`, in place (a collective). Return lines to print.

    `model` is whole on every rank, before and after. `probe` returns its loss on a few samples, equal on all ranks.
    """
    along = world.along("context")
    assert along.group is not None
    broadcast_module(model)
    with raise_on_all_ranks(world):
        expected = probe()
    mode = ContextParallelMode(DeviceMesh.from_group(along.group, world.device.type), {}, model)
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            _split_attention(module, mode)
        elif is_transposed(module):
            _split_conv1d(module, mode)
    run_forwards_in_mode(model, mode)
    check_same_loss(probe, expected, world, "Use --mesh with tensor or pipeline instead")
    with raise_on_all_ranks(world):
        if not mode.calls:
            raise UsageError(code="context-no-sequence", mesh=world.mesh, size=along.size)
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad) / 1e6
    return [
        f"sequences are split over {along.size} ranks along context: each rank computes its positions in "
        f"{plural(mode.calls, 'layer')} and its {'heads or rows' if mode.by_rows else 'heads'} in attention; after "
        f"each backward {gradients:.3g} MB of gradients are all-reduced"
    ]


class ContextParallelMode(DTensorMode):
    calls = 0
    """number of layers that have computed a part of the positions so far"""
    by_rows = False
    """whether an attention was computed by rows"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _POSITIONWISE_FUNCTIONS:
            outputs = self.apply_to_local_positions(func, *args, **kwargs)
            if outputs is not None:
                return outputs
        if func is F.scaled_dot_product_attention and isinstance(args[0], DTensor):
            self.by_rows = self.by_rows or bool(args[0].shape[-3] % self._mesh.size())
        if func not in _UNSHARDABLE_FUNCTIONS:
            try:
                return super().__torch_function__(func, types, args, kwargs)
            except torch.OutOfMemoryError:
                raise
            except (NotImplementedError, RuntimeError):  # torch cannot shard it: each rank computes the whole
                pass
        return func(*tree_map(self._as_whole_tensor, args), **tree_map(self._as_whole_tensor, kwargs))

    def apply_to_local_positions(self, func: Any, x: Any, *args: Any, **kwargs: Any) -> DTensor | None:
        """The result of a function of the last dimension for this rank's positions; None if there are none."""
        if func is F.embedding:
            shard, dim = self._local_words(x, *args, **kwargs)
        elif func is F.layer_norm and len(args[0] if args else kwargs["normalized_shape"]) > 1:
            return None
        else:
            shard, dim = self._local_positions(func, x)
        if shard is None:
            return None
        self.calls += 1
        args, kwargs = tree_map(self._with_summed_gradient, args), tree_map(self._with_summed_gradient, kwargs)
        return DTensor.from_local(func(shard, *args, **kwargs), self._mesh, [Shard(dim)])

    def _local_words(
        self, indices: Any, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> tuple[Tensor | None, int]:  # fmt: skip
        indices, needs_all = full_tensor(indices), max_norm is not None or scale_grad_by_freq or sparse
        if needs_all or indices.ndim != 2 or indices.shape[1] % self._mesh.size():
            return None, 0
        return indices.chunk(self._mesh.size(), 1)[self._mesh.get_local_rank()], 1

    def _local_positions(self, func: Any, x: Any) -> tuple[Tensor | None, int]:
        ranks = self._mesh.size()
        if isinstance(x, DTensor):
            placement = x.placements[0]
            if isinstance(placement, Shard) and not placement.is_shard(x.ndim - 1):
                return with_contiguous_gradient(x.to_local()), placement.dim
        elif not (func is F.linear and isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()):
            return None, 0
        dim = next((dim for dim in (1, 0) if x.ndim > 2 and x.shape[dim] % ranks == 0 and x.shape[dim] > 0), None)
        if dim is None:
            return None, 0
        return reshard_to_local(x if isinstance(x, DTensor) else replicated_from_local(x, self._mesh), dim), dim

    def _with_summed_gradient(self, value: Any) -> Any:
        """A weight as a plain tensor whose gradient is summed over ranks; any other value unchanged."""
        if not isinstance(value, Tensor):
            return value
        whole = self._as_dtensor(self._check_mesh(value))
        return whole.redistribute(placements=REPLICATED).to_local(grad_placements=PARTIAL)

    def _check_mesh(self, value: Any) -> Any:
        if isinstance(value, DTensor) and value.device_mesh != self._mesh:
            raise UsageError(code="context-weight-elsewhere", shape=tuple(value.shape))
        return value

    def _as_whole_tensor(self, value: Any) -> Any:
        whole = full_tensor(self._check_mesh(value))
        return whole.contiguous() if isinstance(value, DTensor) and value.is_contiguous() else whole


def _split_conv1d(module: nn.Module, mode: ContextParallelMode) -> None:
    plain = type(module).forward

    def forward(self: Any, x: Any) -> Any:
        outputs = mode.apply_to_local_positions(F.linear, x, self.weight.T, self.bias)
        return plain(self, full_tensor(x)) if outputs is None else outputs

    replace_forward(module, forward)


def _split_attention(module: nn.MultiheadAttention, mode: ContextParallelMode) -> None:
    """Let nn.MultiheadAttention compute positions and heads. Attention weights are computed as a whole on each rank."""
    plain: Any = type(module).forward

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        inputs = (query, key, value)
        projected: list[Any] = []
        if not (need_weights or self.add_zero_attn or self.bias_k is not None or self.in_proj_weight is None):
            parts = zip(inputs, *split_qkv_parameters(self), strict=True)
            projected = [mode.apply_to_local_positions(F.linear, x, w, b) if x.ndim == 3 else None for x, w, b in parts]
        if not projected or any(y is None for y in projected):
            full_inputs = [full_tensor(x) for x in (*inputs, key_padding_mask)]
            return plain(self, *full_inputs, need_weights, full_tensor(attn_mask), average_attn_weights, is_causal)
        batch_first = [y if self.batch_first else y.transpose(0, 1) for y in projected]
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in batch_first)
        mask = merge_attention_masks(attn_mask, key_padding_mask, q.dtype, self.num_heads)
        mask_dtensor = None if mask is None else replicated_from_local(mask, q.device_mesh)
        y: Any = attention(q, k, v, mask_dtensor, self.dropout if self.training else 0.0)
        mode.by_rows = mode.by_rows or bool(self.num_heads % q.device_mesh.size())
        # (L, B, E), as torch lays it out: a dropout after it draws in the order of memory
        y = reshard_to_local(y.permute(2, 0, 1, 3), 0).flatten(2)
        y = DTensor.from_local(y, q.device_mesh, [Shard(0)])
        y = mode.apply_to_local_positions(F.linear, y, self.out_proj.weight, self.out_proj.bias)
        return y.transpose(0, 1) if self.batch_first else y, None

    replace_forward(module, forward)


_UNSHARDABLE_FUNCTIONS = {  # torch cannot shard these, or not correctly
    torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
    torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
}  # fmt: skip
_POSITIONWISE_FUNCTIONS = {F.embedding, F.linear, F.layer_norm, F.rms_norm}
