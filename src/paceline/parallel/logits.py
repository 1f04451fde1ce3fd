"""The output of a model on a mesh: logits, sharded along the vocabulary (`tensor`) or the sequence (`context`).

The loss function receives one tensor of the whole shape. `F.cross_entropy` computes with the shards. Along the
vocabulary it is torch's `loss_parallel`: ranks exchange three numbers for each position, not the logits of all words
(Shoeybi et al. 2019). Along the sequence each rank computes the losses of its positions, and ranks exchange these
losses. For any other function of the logits, each rank gathers the whole tensor.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._pytree import tree_map

from paceline.parallel.dtensor import full_tensor, replicated_from_local


class ShardedLogits(Tensor):
    """A tensor of the whole shape, of which this rank has a shard. Its autograd graph is that of the shard.

    If a function needs the whole tensor, the tensor and all earlier views of the same output are gathered, in order.
    From then on they are plain tensors, and a write into one changes its views, as on one process.
    """

    shard: DTensor
    whole: Tensor | None
    gather_whole: Callable[[], Tensor]
    output_views: list["weakref.ref[ShardedLogits]"]
    is_flattened: bool
    """whether it is the (B * T, ...) view of a shard of (B, T, ...) along T, which DTensor does not support"""

    @staticmethod
    def of(
        shard: DTensor, fetch: Callable[[], Tensor] | None = None,
        family: list["weakref.ref[ShardedLogits]"] | None = None, *, flat: bool = False,
    ) -> "ShardedLogits":  # fmt: skip
        shape = (shard.shape[0] * shard.shape[1], *shard.shape[2:]) if flat else shard.shape
        logits = Tensor._make_wrapper_subclass(ShardedLogits, shape, dtype=shard.dtype, device=shard.device)  # pyright: ignore[reportAttributeAccessIssue]
        logits.shard, logits.whole, logits.is_flattened = shard, None, flat
        logits.gather_whole = fetch or partial(_gathered, shard)
        logits.output_views = [] if family is None else family
        logits.output_views.append(weakref.ref(logits))
        return logits

    def become_whole(self) -> Tensor:
        for reference in self.output_views:  # a tensor comes before its views
            if (member := reference()) is not None and member.whole is None:
                member.whole = member.gather_whole()
        assert self.whole is not None
        return self.whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute shapes, layouts and the loss with the shard, and all other functions with the whole tensor."""
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], ShardedLogits) else None
        if first is not None and first.whole is None:
            result = _on_shard(func, first, args, kwargs)
            if result is not None:
                return result
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise an error: torch called a kernel without `__torch_function__`, and this tensor has no memory."""
        raise NotImplementedError(f"{func} of sharded logits. Use `logits.clone()`, which is whole and plain")


def _on_shard(func: Any, logits: ShardedLogits, args: Any, kwargs: Any) -> Any:
    """The result of `func` on the shard of its first argument; None if it needs the whole tensor."""
    shard, of_whole = logits.shard, lambda: func(logits.whole, *args[1:], **kwargs)
    if func in _SHAPE_FUNCTIONS and logits.is_flattened:
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            return func(logits, *args[1:], **kwargs)
    if func in _METADATA_FUNCTIONS:
        return func(shard, *args[1:], **kwargs)
    if func is F.cross_entropy:
        return _cross_entropy(shard, *tree_map(_whole, args[1:]), flat=logits.is_flattened, **tree_map(_whole, kwargs))
    if logits.is_flattened or not (func in _OF_LAYOUT or (func is Tensor.__getitem__ and _is_slice(args[1]))):
        return None
    if shard.ndim > 2 and shard.placements[0].is_shard(1):
        shape = func(torch.empty(shard.shape, device="meta"), *args[1:], **kwargs).shape
        if shape == (shard.shape[0] * shard.shape[1], *shard.shape[2:]):
            return ShardedLogits.of(shard, of_whole, logits.output_views, flat=True)
    try:
        result = func(shard, *args[1:], **kwargs)
    except RuntimeError:  # no DTensor has this layout
        return None
    return ShardedLogits.of(result, of_whole, logits.output_views) if _is_sharded(result) else None


def sharded_or_full_logits(value: Any) -> Any:
    return ShardedLogits.of(value) if _is_sharded(value) else full_tensor(value)


def _is_sharded(value: Any) -> bool:
    return isinstance(value, DTensor) and value.is_floating_point() and value.placements[0].is_shard()


def _gathered(shard: DTensor) -> Tensor:
    whole: Tensor = full_tensor(shard)
    # autograd does not allow writes into the tensor of a DTensor
    return whole.clone() if whole.requires_grad else whole


def _whole(value: Any) -> Any:
    return value.become_whole() if isinstance(value, ShardedLogits) else value


def _is_slice(index: Any) -> bool:
    indices = index if isinstance(index, tuple) else [index]
    return all(part is None or isinstance(part, slice | type(...)) for part in indices)


def _cross_entropy(
    shard: DTensor, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0, *, flat: bool,
) -> Tensor | None:  # fmt: skip
    """`F.cross_entropy` of sharded logits, plain and equal on every rank; None if it needs the whole logits.

    `shard`: (B, classes, ...) along the classes or a dimension after them; if `flat`, (B, T, classes) along T.
    `target`: as one process has it, (B, ...) or (B * T).
    """
    mesh, placement = shard.device_mesh, shard.placements[0]
    dim: int = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
    if size_average is not None or reduce is not None or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    by_classes = dim == 1 and not flat
    if by_classes:
        fits = label_smoothing == 0.0
    else:
        fits = (shard.ndim == 3 if flat else dim > 1) and not (weight is not None and label_smoothing)
    if not fits:
        return None
    classes = shard.shape[-1] if flat else shard.shape[1]
    valid = target != ignore_index
    in_range = ~valid | ((target >= 0) & (target < classes))
    torch._assert_async(in_range.all(), f"a target is not one of the {classes} classes")  # pyright: ignore
    if by_classes:
        options = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
        return _LossParallel.apply(shard.to_local(), target, shard.shape, mesh, options)
    of_target = 1 if flat else dim - 1
    targets = (target.view(shard.shape[:2]) if flat else target).chunk(mesh.size(), of_target)[mesh.get_local_rank()]
    logits = shard.to_local().flatten(0, 1) if flat else shard.to_local()
    losses = F.cross_entropy(
        logits, targets.flatten() if flat else targets, weight, ignore_index=ignore_index, reduction="none",
        label_smoothing=label_smoothing,
    )  # fmt: skip
    all_losses: Tensor = full_tensor(DTensor.from_local(losses.view(targets.shape), mesh, [Shard(of_target)]))
    all_losses = all_losses.reshape(target.shape)
    if reduction == "none":
        return all_losses
    if reduction == "sum":
        return all_losses.sum()
    return all_losses.sum() / (valid.sum() if weight is None else weight[target[valid]].sum())


class _LossParallel(torch.autograd.Function):
    """torch's `loss_parallel`. Its backward must also run in this context, which a plain call would leave."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, target: Tensor, shape: Any, mesh: DeviceMesh, options: Any) -> Tensor:
        stride = torch.empty(shape, device="meta").stride()
        logits = DTensor.from_local(shard.detach(), mesh, [Shard(1)], shape=shape, stride=stride).requires_grad_()
        with torch.enable_grad(), loss_parallel():
            loss: Any = F.cross_entropy(logits, target, **options)
        ctx.graph = logits, loss
        return loss.to_local().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        logits, loss = ctx.graph
        with loss_parallel():
            (gradient,) = torch.autograd.grad(loss, logits, replicated_from_local(gradients[0], logits.device_mesh))
        return gradient.to_local(), None, None, None, None


_SHAPE_FUNCTIONS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim")), Tensor.size, Tensor.dim, Tensor.numel,
    Tensor.__len__,
}  # fmt: skip
_METADATA_FUNCTIONS = {
    *_SHAPE_FUNCTIONS, *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "layout")),
    Tensor.is_floating_point, torch.is_floating_point,
    Tensor.register_hook,  # fsdp registers a hook for the begin of backward
}  # fmt: skip
_OF_LAYOUT = {
    Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, Tensor.transpose, torch.transpose, Tensor.permute,
    torch.permute, Tensor.movedim, torch.movedim, Tensor.contiguous, Tensor.float, Tensor.double,
}  # fmt: skip
