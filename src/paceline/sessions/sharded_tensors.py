"""What stands where ranks hold shares of a tensor, and how the shares are got at.

Under `zero` nobody can reach a gradient that is cut. Under `fsdp` parameters and gradients are torch's DTensors: what
torch computes with them is right, torch's own clip_grad_norm_ as well.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from paceline.errors import UsageError

AS_WHOLE = ("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__reduce_ex__")


class ShardedGradientPlaceholder(torch.Tensor):
    """Stands for a gradient that ranks hold in shares: whoever computes with it would compute with nothing."""

    words = (
        "on a gradient that is sharded over ranks: under this strategy each rank holds only a shard of it. To clip, "
        "call s.clip_grad_norm(max_norm)"
    )

    @classmethod
    def of(cls, tensor: Tensor) -> Tensor:
        """In place of `tensor`, or of its gradient."""
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            cls, tensor.shape, dtype=tensor.dtype, device=tensor.device, strides=tensor.stride()
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Whatever it is, refuse."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise UsageError(code="sharded-parameter-used", func=func, reason=cls.words)


class InvalidatedParameter(ShardedGradientPlaceholder):
    """Stands for a parameter that the model had before it was cut: it would keep its first values for ever."""

    words = (
        "on a parameter from before s.prepare: strategy 'fsdp' has sharded it, and the model now has a different one. "
        "Take model.parameters() after s.prepare"
    )

    @property
    def grad(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Never there: it would be None, and nobody would notice."""
        raise UsageError(code="sharded-gradient-used", reason=self.words)


def invalidate_replaced_parameters(given: Iterable[nn.Parameter], model: nn.Module) -> None:
    """Of the parameters that `model` was given with, make those that it no longer has a `InvalidatedParameter`, whoever holds them.

    A model that was cut has no whole copy either.
    """
    own = {id(parameter) for parameter in model.parameters()}
    for parameter in given:
        if id(parameter) not in own:
            torch.utils.swap_tensors(parameter, InvalidatedParameter.of(parameter))
            model.__dict__["__deepcopy__"] = raise_on_copy
            require_whole_tensors()


def raise_on_copy(_: object) -> NoReturn:
    """In place of a copy."""
    raise UsageError(code="sharded-model-copied")


def require_whole_tensors() -> None:
    """From now on no share of a DTensor passes for the whole: as a number, an array, or in a file."""
    from torch.distributed.tensor import DTensor

    for name in AS_WHOLE:
        if not hasattr(method := getattr(DTensor, name), "only_whole"):
            setattr(DTensor, name, _only_whole(method))


def _only_whole(method: Callable[..., Any]) -> Callable[..., Any]:
    def asked(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.device_mesh.size() > 1 and not all(placed.is_replicate() for placed in tensor.placements):
            raise UsageError(code="sharded-tensor-reduced", method=method.__name__)
        return method(tensor, *args, **kwargs)

    asked.only_whole = True  # pyright: ignore[reportFunctionMemberAccess]
    return asked


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor: asked so, as the import costs every other strategy a second."""
    return hasattr(tensor, "device_mesh")


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's share of it, in the same memory; itself, where it is not cut."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def distribute_like(whole: Tensor, *, like: Tensor) -> Tensor:
    """`whole`, which all ranks have, on the device of `like` and cut as it is."""
    if not is_dtensor(like):
        return whole.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    cut: Any = like
    return distribute_tensor(whole.to(like.device), cut.device_mesh, cut.placements, src_data_rank=None)
