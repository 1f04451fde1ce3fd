"""Along `context` each rank computes its part of every sequence, from the first layer to the scores of the last.

The model's code sees whole tensors (see `view`). Where a sequence comes in, at an embedding of words (B, T) or a linear
layer of (B, T, C), a rank takes its places. Layers that look at each place by itself are computed with plain tensors,
for these places only. Attention needs all of them: there ranks exchange places for heads, and back (Ulysses, Jacobs et
al. 2023); where heads do not divide, each computes its rows, with the keys and values of all.

Weights are whole on every rank; their gradients are added up along context in each backward.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

from paceline.collectives.control import together
from paceline.collectives.replicate import broadcast_module
from paceline.compute.rules import subclassed
from paceline.errors import UsageError, plural
from paceline.rank.world import World
from paceline.tensor.attention import attention
from paceline.tensor.cut import compare_losses, computed_in
from paceline.tensor.exchange import EVERYWHERE, SUMMANDS, everywhere, share_along, without_gaps
from paceline.tensor.layers import apart, is_transposed, mask_of_heads
from paceline.tensor.view import View, made_whole


def share_along_context(model: nn.Module, world: World, probe: Callable[[], float]) -> list[str]:
    """Let the ranks along `context` share every sequence of `model`, in place (a collective of all ranks).

    Args:
        model: whole, on every rank, and it stays so.
        world: with a dimension of that name.
        probe: a loss of the model on a few samples, the same on all ranks: asked before and after.

    Returns:
        What the user should know.

    Raises:
        UsageError: there is no sequence to be shared; or it does not give the loss of the whole model. On one rank,
            ToldElsewhere on the others.
    """
    along = world.along("context")
    assert along.group is not None
    broadcast_module(model)
    with together(world):
        expected = probe()
    view = Sequences(DeviceMesh.from_group(along.group, world.device.type), model)
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            _share_attention(module, view)
        elif is_transposed(module):
            _share_conv1d(module, view)
    computed_in(model, view)
    compare_losses(probe, expected, world, "Use --mesh with tensor or pipeline instead")
    with together(world):
        if not view.shared:
            raise UsageError(code="context-no-sequence", mesh=world.mesh, size=along.size)
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad) / 1e6
    return [
        f"sequences are shared over {along.size} ranks along context: each computes its places in "
        f"{plural(view.shared, 'layer')}, its {'heads or rows' if view.rows else 'heads'} in attention; after each "
        f"backward {gradients:.3g} MB of gradients are added up"
    ]


class Sequences(View):
    """Around a forward of the model."""

    def __init__(self, mesh: DeviceMesh, model: nn.Module) -> None:
        super().__init__(mesh, {}, model)
        self.shared = 0
        """how many layers have computed a part of the places so far"""
        self.rows = False
        """whether an attention has been computed by rows"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the module's docstring."""
        kwargs = kwargs or {}
        if func in _OF_A_PLACE:
            found = self.of_each_place(func, *args, **kwargs)
            if found is not None:
                return found
        if func is F.scaled_dot_product_attention and isinstance(args[0], DTensor):
            self.rows = self.rows or bool(args[0].shape[-3] % self._mesh.size())
        if func in _OF_NEIGHBOURS:
            return func(*tree_map(self._as_on_one, args), **tree_map(self._as_on_one, kwargs))
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except (NotImplementedError, RuntimeError):  # torch cannot share it: then on all ranks alike
            return func(*tree_map(self._as_on_one, args), **tree_map(self._as_on_one, kwargs))

    def of_each_place(self, func: Any, x: Any, *args: Any, **kwargs: Any) -> DTensor | None:
        """What a function that looks at the last dimension only gives of this rank's places; None if there are none."""
        if func is F.embedding:
            share, dim = self._own_words(x, *args, **kwargs)
        elif func is F.layer_norm and len(args[0] if args else kwargs["normalized_shape"]) > 1:
            return None
        else:
            share, dim = self._own_places(func, x)
        if share is None:
            return None
        self.shared += 1
        args, kwargs = tree_map(self._for_a_part, args), tree_map(self._for_a_part, kwargs)
        return DTensor.from_local(func(share, *args, **kwargs), self._mesh, [Shard(dim)])

    def _own_words(
        self, words: Any, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> tuple[Tensor | None, int]:  # fmt: skip
        words, of_all = made_whole(words), max_norm is not None or scale_grad_by_freq or sparse
        if of_all or words.ndim != 2 or words.shape[1] % self._mesh.size():
            return None, 0
        return words.chunk(self._mesh.size(), 1)[self._mesh.get_local_rank()], 1

    def _own_places(self, func: Any, x: Any) -> tuple[Tensor | None, int]:
        ranks = self._mesh.size()
        if isinstance(x, DTensor):
            place = x.placements[0]
            if place.is_shard() and not place.is_shard(x.ndim - 1):
                return without_gaps(x.to_local()), place.dim  # pyright: ignore[reportAttributeAccessIssue]
        elif not (func is F.linear and isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()):
            return None, 0
        dim = next((dim for dim in (1, 0) if x.ndim > 2 and x.shape[dim] % ranks == 0 and x.shape[dim] > 0), None)
        if dim is None:
            return None, 0
        return share_along(x if isinstance(x, DTensor) else everywhere(x, self._mesh), dim), dim

    def _for_a_part(self, one: Any) -> Any:
        """A weight, for a part of the work: its gradient is added up over ranks."""
        if not isinstance(one, Tensor):
            return one
        there = self._seen(self._ours(one))
        return there.redistribute(placements=EVERYWHERE).to_local(grad_placements=SUMMANDS)

    def _ours(self, one: Any) -> Any:
        """Not what fsdp holds."""
        if isinstance(one, DTensor) and one.device_mesh != self._mesh:
            raise UsageError(code="context-weight-elsewhere", shape=tuple(one.shape))
        return one

    def _as_on_one(self, one: Any) -> Any:
        """Whole and plain, in memory as it would lie on one process."""
        whole = made_whole(self._ours(one))
        return whole.contiguous() if isinstance(one, DTensor) and one.is_contiguous() else whole


def _share_conv1d(module: nn.Module, view: Sequences) -> None:
    """Let a linear layer of Hugging Face's, which is none of torch's, compute places."""
    plain = type(module).forward

    def forward(self: Any, x: Any) -> Any:
        found = view.of_each_place(F.linear, x, self.weight.T, self.bias)
        return plain(self, made_whole(x)) if found is None else found

    subclassed(module, forward=apart(forward))


def _share_attention(module: nn.MultiheadAttention, view: Sequences) -> None:
    """Let nn.MultiheadAttention compute places and heads; weights of attention are asked for on all ranks alike."""
    plain: Any = type(module).forward

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        inputs = (query, key, value)
        found: list[Any] = []
        if not (need_weights or self.add_zero_attn or self.bias_k is not None or self.in_proj_weight is None):
            weights = self.in_proj_weight.chunk(3)
            biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            parts = zip(inputs, weights, biases, strict=True)
            found = [view.of_each_place(F.linear, x, w, b) if x.ndim == 3 else None for x, w, b in parts]
        if not found or any(one is None for one in found):
            whole = [made_whole(x) for x in (*inputs, key_padding_mask)]
            return plain(self, *whole, need_weights, made_whole(attn_mask), average_attn_weights, is_causal)
        of_heads = [y if self.batch_first else y.transpose(0, 1) for y in found]
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in of_heads)
        mask = mask_of_heads(attn_mask, key_padding_mask, q.dtype, self.num_heads)
        seen = None if mask is None else everywhere(mask, q.device_mesh)
        y: Any = attention(q, k, v, seen, self.dropout if self.training else 0.0)
        view.rows = view.rows or bool(self.num_heads % q.device_mesh.size())
        # (L, B, E), as torch lays it out: a dropout behind it draws in the order of memory
        y = share_along(y.permute(2, 0, 1, 3), 0).flatten(2)
        y = DTensor.from_local(y, q.device_mesh, [Shard(0)])
        y = view.of_each_place(F.linear, y, self.out_proj.weight, self.out_proj.bias)
        return y.transpose(0, 1) if self.batch_first else y, None

    subclassed(module, forward=apart(forward))


_OF_NEIGHBOURS = {  # torch has no way to share these, or a wrong one
    torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
    torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
}  # fmt: skip
_OF_A_PLACE = {F.embedding, F.linear, F.layer_norm, F.rms_norm}
