"""What a model gives that ranks share: scores, a share on each rank, of words (`tensor`) or of places (`context`).

To the loss they are one tensor of the whole shape. `F.cross_entropy` takes them as they lie: of words by torch's
`loss_parallel`, for which ranks exchange three numbers a place, not the scores of all words (Shoeybi et al. 2019); of
places each rank computes the losses of its own, and all get all of these. Whatever else is computed with scores gets
them whole, on every rank.
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

from paceline.parallel.exchange import everywhere
from paceline.parallel.view import made_whole


class Scores(Tensor):
    """A tensor of the whole shape, of which this rank has a share; its graph is the share's.

    Once anything asks for the whole, what was laid out otherwise from the same output becomes whole with it, in order:
    from then on they are plain tensors, and a write into one is seen in its views, as on one process.
    """

    share: DTensor
    whole: Tensor | None
    fetch: Callable[[], Tensor]
    family: list["weakref.ref[Scores]"]
    flat: bool
    """whether it is (B * T, ...) of a share of (B, T, ...) that is cut along T, which no DTensor can be"""

    @staticmethod
    def of(
        share: DTensor, fetch: Callable[[], Tensor] | None = None, family: list["weakref.ref[Scores]"] | None = None,
        *, flat: bool = False,
    ) -> "Scores":  # fmt: skip
        """The whole of `share`, which `fetch` gives; `family`: what was made of the same output before."""
        shape = (share.shape[0] * share.shape[1], *share.shape[2:]) if flat else share.shape
        made = Tensor._make_wrapper_subclass(Scores, shape, dtype=share.dtype, device=share.device)  # pyright: ignore[reportAttributeAccessIssue]
        made.share, made.whole, made.fetch, made.flat = share, None, fetch or partial(_fetched, share), flat
        made.family = [] if family is None else family
        made.family.append(weakref.ref(made))
        return made

    def become_whole(self) -> Tensor:
        """The whole, plain and alike on every rank."""
        for known in self.family:  # what one is laid out from comes before it
            if (one := known()) is not None and one.whole is None:
                one.whole = one.fetch()
        assert self.whole is not None
        return self.whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What only looks, or lays it out otherwise, takes the share; the loss, too; all else the whole."""
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Scores) else None
        if first is not None and first.whole is None:
            found = _on_share(func, first, args, kwargs)
            if found is not None:
                return found
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Never, but for what calls torch's kernels past `__torch_function__`: that would see no numbers."""
        raise NotImplementedError(f"{func} of scores that ranks share: `scores.clone()` is whole, and plain")


def _on_share(func: Any, scores: Scores, args: Any, kwargs: Any) -> Any:
    """What `func` gives of the share of its first argument; None where it needs the whole."""
    share, whole = scores.share, lambda: func(scores.whole, *args[1:], **kwargs)
    if func in _OF_SHAPE and scores.flat:
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            return func(scores, *args[1:], **kwargs)
    if func in _SEEN:
        return func(share, *args[1:], **kwargs)
    if func is F.cross_entropy:
        others, options = tree_map(_whole, args[1:]), tree_map(_whole, kwargs)
        found = None if scores.flat else shared_cross_entropy(share, *others, **options)
        return cross_entropy_of_places(share, *others, flat=scores.flat, **options) if found is None else found
    if scores.flat or not (func in _LAID_OUT or (func is Tensor.__getitem__ and _is_slice(args[1]))):
        return None
    if share.ndim > 2 and share.placements[0].is_shard(1):
        shape = func(torch.empty(share.shape, device="meta"), *args[1:], **kwargs).shape
        if shape == (share.shape[0] * share.shape[1], *share.shape[2:]):
            return Scores.of(share, whole, scores.family, flat=True)
    try:
        found = func(share, *args[1:], **kwargs)
    except RuntimeError:  # no DTensor can be laid out so
        return None
    return Scores.of(found, whole, scores.family) if _is_cut(found) else None


def given(one: Any) -> Any:
    """What a model's caller gets for what the model gives: scores as a share, all else whole."""
    return Scores.of(one) if _is_cut(one) else made_whole(one)


def _is_cut(one: Any) -> bool:
    return isinstance(one, DTensor) and one.is_floating_point() and one.placements[0].is_shard()


def _fetched(share: DTensor) -> Tensor:
    whole: Tensor = made_whole(share)
    return whole.clone() if whole.requires_grad else whole  # autograd lets nobody write into a DTensor's


def _whole(one: Any) -> Any:
    return one.become_whole() if isinstance(one, Scores) else one


def _is_slice(index: Any) -> bool:
    indices = index if isinstance(index, tuple) else [index]
    return all(one is None or isinstance(one, slice | type(...)) for one in indices)


def shared_cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """`F.cross_entropy` of scores that are cut by classes, plain and alike on every rank; None where torch has no way.

    Raises:
        RuntimeError: a target is no class (on a GPU when it is found, as torch's own).
    """
    classes = isinstance(input, DTensor) and input.ndim > 1 and input.placements[0].is_shard(1)
    usual = size_average is None and reduce is None and label_smoothing == 0.0
    if not (classes and usual and isinstance(target, Tensor) and not target.is_floating_point()):
        return None
    there = (target == ignore_index) | ((target >= 0) & (target < input.shape[1]))
    torch._assert_async(there.all(), f"a target is none of the {input.shape[1]} classes")  # pyright: ignore
    options = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    return _LossParallel.apply(input.to_local(), target, input.shape, input.device_mesh, options)


def cross_entropy_of_places(
    input: DTensor, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0, *, flat: bool,
) -> Tensor | None:  # fmt: skip
    """`F.cross_entropy` of scores that are cut by places, plain and alike on every rank; None where they are not.

    Args:
        input: (B, classes, T, ...), cut along one of the last dimensions; or `flat`, and (B, T, classes), cut along T.
        target: as one process has it, (B, T, ...) or (B * T).

    Raises:
        RuntimeError: a target is no class (on a GPU when it is found, as torch's own).
    """
    mesh, place = input.device_mesh, input.placements[0]
    usual = size_average is None and reduce is None and not (weight is not None and label_smoothing)
    if not (usual and place.is_shard() and isinstance(target, Tensor) and not target.is_floating_point()):
        return None
    classes, dim = (input.shape[-1], 1) if flat else (input.shape[1], place.dim - 1)  # pyright: ignore[reportAttributeAccessIssue]
    if dim < 1 or input.ndim < 3 or (flat and input.ndim > 3):
        return None
    valid = target != ignore_index
    there = ~valid | ((target >= 0) & (target < classes))
    torch._assert_async(there.all(), f"a target is none of the {classes} classes")  # pyright: ignore
    laid_out = target.view(input.shape[:2]) if flat else target
    own = laid_out.chunk(mesh.size(), dim)[mesh.get_local_rank()]
    scores = input.to_local().flatten(0, 1) if flat else input.to_local()
    losses = F.cross_entropy(
        scores, own.flatten() if flat else own, weight, ignore_index=ignore_index, reduction="none",
        label_smoothing=label_smoothing,
    )  # fmt: skip
    shared = DTensor.from_local(losses.view(own.shape), mesh, [Shard(dim)])
    found: Tensor = made_whole(shared).reshape(target.shape)
    if reduction == "none":
        return found
    if reduction == "sum":
        return found.sum()
    return found.sum() / (valid.sum() if weight is None else weight[target[valid]].sum())


class _LossParallel(torch.autograd.Function):
    """torch's loss on shares, whose backward must be inside its context as well; here the forward alone would be."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, target: Tensor, shape: Any, mesh: DeviceMesh, options: Any) -> Tensor:
        """As `F.cross_entropy` of the (N, classes, ...) of which `share` is this rank's part."""
        stride = torch.empty(shape, device="meta").stride()
        scores = DTensor.from_local(share.detach(), mesh, [Shard(1)], shape=shape, stride=stride).requires_grad_()
        with torch.enable_grad(), loss_parallel():
            loss: Any = F.cross_entropy(scores, target, **options)
        ctx.graph = scores, loss
        return loss.to_local().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient of this rank's part."""
        scores, loss = ctx.graph
        with loss_parallel():
            (found,) = torch.autograd.grad(loss, scores, everywhere(gradients[0], scores.device_mesh))
        return found.to_local(), None, None, None, None


_OF_SHAPE = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim")), Tensor.size, Tensor.dim, Tensor.numel,
    Tensor.__len__,
}  # fmt: skip
_SEEN = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout")),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, torch.is_floating_point,
    Tensor.register_hook,  # fsdp's, which is told when the backward begins
}  # fmt: skip
_LAID_OUT = {
    Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, Tensor.transpose, torch.transpose, Tensor.permute,
    torch.permute, Tensor.movedim, torch.movedim, Tensor.contiguous, Tensor.float, Tensor.double,
}  # fmt: skip
