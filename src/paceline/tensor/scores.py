"""What a model that is cut along `tensor` gives where its last layer is cut by words: the scores, a share on each rank.

To the loss they are one tensor of the whole shape. `F.cross_entropy` takes them as they lie: ranks exchange three
numbers for each place in place of the scores of all words (Megatron's vocabulary-parallel loss, Shoeybi et al. 2019).
Whatever else is computed with them gets them whole, on every rank.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from paceline.tensor.view import made_whole

HALVES = (torch.float16, torch.bfloat16)


class Scores(Tensor):
    """A tensor of the whole shape, of which this rank has a share; its graph is the share's."""

    share: DTensor

    @staticmethod
    def of(share: DTensor) -> "Scores":
        """The whole of `share`."""
        made = Tensor._make_wrapper_subclass(Scores, share.shape, dtype=share.dtype, device=share.device)  # pyright: ignore[reportAttributeAccessIssue]
        made.share = share
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What only looks, or lays it out otherwise, takes the share; the loss, too; all else the whole."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__" and isinstance(args[0], Scores):
            if func in _SAME:
                return func(args[0].share)
            return func(made_whole(args[0].share))
        if func in _LAID_OUT or (func is Tensor.__getitem__ and _is_slice(args[1])):
            return given(func(*tree_map(_share, args), **tree_map(_share, kwargs)))
        args, kwargs = tree_map(_share, args), tree_map(_share, kwargs)
        if func is F.cross_entropy and (found := shared_cross_entropy(*args, **kwargs)) is not None:
            return found
        return func(*tree_map(made_whole, args), **tree_map(made_whole, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Never: `__torch_function__` takes it apart before."""
        raise NotImplementedError(f"{func} of scores that ranks share")


def given(one: Any) -> Any:
    """What a model's caller gets for what the model gives: scores as a share, all else whole."""
    if isinstance(one, DTensor) and one.is_floating_point() and one.placements[0].is_shard():
        return Scores.of(one)
    return made_whole(one)


def _is_slice(index: Any) -> bool:
    return all(
        one is None or isinstance(one, slice | type(...)) for one in (index if isinstance(index, tuple) else [index])
    )


def _share(one: Any) -> Any:
    return one.share if isinstance(one, Scores) else one


def shared_cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """`F.cross_entropy` of scores that are cut by classes, plain and alike on every rank; None for any other."""
    classes = isinstance(input, DTensor) and input.ndim > 1 and input.placements[0].is_shard(1)
    classes = classes and input.shape[1] % input.device_mesh.size() == 0
    usual = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    target = made_whole(target)
    if not (classes and usual and isinstance(target, Tensor) and not target.is_floating_point()):
        return None
    share = input.to_local().movedim(1, -1)
    if share.dtype in HALVES and torch.is_autocast_enabled(share.device.type):
        share = share.float()
    mesh = input.device_mesh
    first = mesh.get_local_rank() * (input.shape[1] // mesh.size())
    losses: Tensor = _CrossEntropy.apply(share.flatten(0, -2), target.flatten(), first, ignore_index, mesh.get_group())
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(scores)[target] of each place."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, target: Tensor, first: int, ignored: int, group: Any) -> Tensor:
        """(N,) of the (N, classes of this rank) of `share`, which are those from `first` on, and (N,) targets."""
        scores = share.float() if share.dtype in HALVES else share
        largest = scores.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        powers = (scores - largest[:, None]).exp_()
        kept, at = target != ignored, (target - first).clamp(0, share.shape[1] - 1)
        own = kept & (target >= first) & (target < first + share.shape[1])
        mine = scores.gather(1, at[:, None]).squeeze(1) - largest
        sums = torch.stack([powers.sum(1), torch.where(own, mine, 0)])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(powers.div_(sums[0][:, None]), kept, own, at)
        return torch.where(kept, sums[0].log() - sums[1], 0).to(share.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """softmax(scores), less 1 at the target, times the gradient."""
        softmax, kept, own, at = ctx.saved_tensors
        given = torch.where(kept, gradients[0], 0)
        found = softmax * given[:, None]
        found.scatter_add_(1, at[:, None], -torch.where(own, given, 0)[:, None].to(found.dtype))
        return found.to(gradients[0].dtype), None, None, None, None


_SAME = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout")}
_LAID_OUT = {
    Tensor.register_hook, Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point,
    torch.is_floating_point, Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, Tensor.transpose,
    torch.transpose, Tensor.permute, torch.permute, Tensor.movedim, torch.movedim, Tensor.contiguous, Tensor.float,
    Tensor.double, Tensor.to,
}  # fmt: skip
