"""Inside a model that is cut along `tensor`: what its own code sees between a layer that is cut and the next.

A column-wise layer knows a share of its outputs. What it gives is torch's DTensor: to the model's code a tensor of the
whole shape, to this rank its share. So code that knows nothing of ranks (`view(B, T, heads, C // heads)`, a softmax, a
mask) computes what one process would; where an operation needs more than the share, torch fetches it: a layer that is
cut in an unlucky place is slow, never wrong.

What torch's DTensor leaves to be done is done here, by listening to each function that is called in the model's
forward: plain tensors beside DTensors are everybody's alike; random numbers are drawn for the whole tensor, as one
process draws them, and each rank takes its share; attention is computed by heads; a fused projection of queries, keys
and values is taken apart without sending anything.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from paceline.checkpoint.shards import ShardedParameter
from paceline.parallel.attention import attention, dropout
from paceline.parallel.exchange import EVERYWHERE, everywhere


class Fused(Tensor):
    """What a fused projection gives: several tensors that the model's code sees as one, along the last dimension."""

    parts: Sequence[DTensor]

    @staticmethod
    def of(parts: Sequence[DTensor]) -> "Fused":
        """One tensor of `parts`, which lie side by side."""
        first = parts[0]
        shape = [*first.shape[:-1], sum(part.shape[-1] for part in parts)]
        made = Tensor._make_wrapper_subclass(Fused, shape, dtype=first.dtype, device=first.device)  # pyright: ignore[reportAttributeAccessIssue]
        made.parts = parts
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Never: `View` takes it apart before."""
        raise NotImplementedError(f"{func} of a fused projection outside the model's forward")


class View(TorchFunctionMode):
    """Around a forward of the model."""

    def __init__(self, mesh: DeviceMesh, cuts: Mapping[str, ShardedParameter], model: nn.Module) -> None:
        """`cuts`: by name the parameters of which this rank holds a part."""
        super().__init__()
        self._mesh = mesh
        # weak: fsdp puts other tensors in the place of these, which then go
        self._cuts = {id(p): (weakref.ref(p), cuts[name]) for name, p in model.named_parameters() if name in cuts}
        self.used_elsewhere: set[int] = set()
        """parameters, by identity, that code beside their own layers has used"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the module's docstring."""
        kwargs = kwargs or {}
        if not any(map(self._concerns, _leaves((*args, *kwargs.values())))):
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__" and isinstance(args[0], Fused):
            return func(*args, **kwargs)  # its shape, say
        if func in _TAKEN_APART and isinstance(args[0], Fused):
            found = _taken_apart(func, *args, **kwargs)
            if found is not None:
                return found
        if func in _JOINED:  # nothing, of one dimension, counts as nothing of any: caches of keys begin so
            args = ([one for one in args[0] if one.shape != (0,)], *args[1:])
            if len(args[0]) == 1:
                return args[0][0]
        args, kwargs = tree_map(self._seen, args), tree_map(self._seen, kwargs)
        if func in _DROPOUT:
            return dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        if func in _DRAWN_INTO:
            drawn = func(made_whole(args[0]).clone(), *args[1:], **kwargs)
            return args[0].copy_(everywhere(drawn, self._mesh))
        if func in _WHOLE:
            args, kwargs = tree_map(made_whole, args), tree_map(made_whole, kwargs)
        return func(*args, **kwargs)

    def _concerns(self, one: Any) -> bool:
        return isinstance(one, (DTensor, Fused)) or self._is_cut(one)

    def _is_cut(self, one: Any) -> bool:
        return id(one) in self._cuts and self._cuts[id(one)][0]() is one

    def _seen(self, one: Any) -> Any:
        """As a DTensor, if it is a tensor."""
        if isinstance(one, DTensor) or not isinstance(one, Tensor):
            return one
        if isinstance(one, Fused):
            return _joined(one.parts, -1)
        if not self._is_cut(one):
            return everywhere(one, self._mesh)
        self.used_elsewhere.add(id(one))
        cut = self._cuts[id(one)][1]
        runs = one.split([stop - start for start, stop in cut.runs], cut.dim)
        shared = [DTensor.from_local(run, self._mesh, [Shard(cut.dim)]) for run in runs]
        return shared[0] if len(shared) == 1 else _joined(shared, cut.dim)


def _joined(parts: Sequence[DTensor], dim: int) -> Tensor:
    """One tensor of several that lie side by side, whole on every rank."""
    return torch.cat([part.redistribute(placements=EVERYWHERE) for part in parts], dim)


def _leaves(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def made_whole(one: Any) -> Any:
    """A plain tensor of the whole, on every rank; anything else as it is."""
    one = _joined(one.parts, -1) if isinstance(one, Fused) else one
    return one.redistribute(placements=EVERYWHERE).to_local() if isinstance(one, DTensor) else one


def _taken_apart(func: Any, fused: Fused, *args: Any, **kwargs: Any) -> Any:
    """The parts of a fused projection, where that is what is asked for; else None."""
    parts, widths = fused.parts, [part.shape[-1] for part in fused.parts]
    if func in _CUTS:
        dim = kwargs.pop("dim", args[1] if len(args) > 1 else 0)
        size = [*args, *kwargs.values()][0]
        equal = len(parts) if func in _CHUNKS else widths[0]
        fits = size == equal and len(set(widths)) == 1 if isinstance(size, int) else [*(size or ())] == widths
        return tuple(parts) if fits and dim in (-1, fused.ndim - 1) else None
    if func is Tensor.unflatten:
        dim, sizes = [*args, *kwargs.values()]
        shape = [*fused.shape[:-1], *sizes] if dim in (-1, fused.ndim - 1) else []
    else:
        shape = [*args[0]] if args and isinstance(args[0], (tuple, list)) else [*args]
    if -1 in shape:
        rest = prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = prod(fused.shape) // rest
    lead = fused.ndim - 1
    if shape[:lead] != [*fused.shape[:-1]] or len(set(widths)) > 1 or shape[lead : lead + 1] != [len(parts)]:
        return None
    return torch.stack([part.reshape(shape[:lead] + shape[lead + 1 :]) for part in parts], lead)


_CHUNKS = {torch.chunk, Tensor.chunk}
_CUTS = {torch.split, Tensor.split, *_CHUNKS}
_TAKEN_APART = {*_CUTS, Tensor.unflatten, Tensor.view, Tensor.reshape, torch.reshape}
_JOINED = {torch.cat, torch.concat, torch.concatenate}
_DROPOUT = {F.dropout, torch.dropout}
_DRAWN_INTO = {Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_}
_WHOLE = {  # each rank computes all of it: random numbers, or what is no tensor
    torch.rand_like, torch.randn_like, torch.bernoulli, Tensor.bernoulli, torch.multinomial, F.alpha_dropout,
    F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.rrelu, F.gumbel_softmax, Tensor.item,
    Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__,
}  # fmt: skip
