"""Protection from wrong use of sharded parameters and gradients.

Under `zero` the loop cannot read sharded gradients: `.grad` is a placeholder whose use is an error. Under `fsdp`
parameters and gradients are torch's DTensors, and torch computes correctly with them, for example in clip_grad_norm_.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from paceline.errors import UsageError

WHOLE_TENSOR_METHODS = (
    "item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__reduce_ex__",
)  # fmt: skip


class ShardedGradientPlaceholder(torch.Tensor):
    """Placeholder for a gradient that is sharded over ranks. A computation with it raises UsageError."""

    error_code = "sharded-gradient-used"

    @classmethod
    def of(cls, tensor: Tensor) -> Tensor:
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            cls, tensor.shape, dtype=tensor.dtype, device=tensor.device, strides=tensor.stride()
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise UsageError(code=cls.error_code, func=func)


class InvalidatedParameter(ShardedGradientPlaceholder):
    """Placeholder for a parameter of the model before it was sharded, which would keep its initial values."""

    error_code = "replaced-parameter-used"

    @property
    def grad(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Raise UsageError: otherwise it would silently be None."""
        raise UsageError(code=self.error_code, func=".grad")


def invalidate_replaced_parameters(before: Iterable[nn.Parameter], model: nn.Module) -> None:
    """Turn parameters that `model` no longer has into an `InvalidatedParameter`, for all references to them.

    If there are any, the model is sharded: then copies of it raise UsageError, and DTensors are protected.
    """
    current = {id(parameter) for parameter in model.parameters()}
    for parameter in before:
        if id(parameter) not in current:
            torch.utils.swap_tensors(parameter, InvalidatedParameter.of(parameter))
            model.__dict__["__deepcopy__"] = raise_on_copy
            forbid_shard_conversions()


def raise_on_copy(_: object) -> NoReturn:
    raise UsageError(code="sharded-model-copied")


def forbid_shard_conversions() -> None:
    """Let DTensor raise UsageError if a shard would be used as the whole: as a number, an array, or in a file."""
    from torch.distributed.tensor import DTensor

    for name in WHOLE_TENSOR_METHODS:
        if not hasattr(method := getattr(DTensor, name), "only_whole"):
            setattr(DTensor, name, _only_whole(method))


def _only_whole(method: Callable[..., Any]) -> Callable[..., Any]:
    def checked(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.device_mesh.size() > 1 and not all(p.is_replicate() for p in tensor.placements):
            raise UsageError(code="sharded-tensor-reduced", method=method.__name__)
        return method(tensor, *args, **kwargs)

    checked.only_whole = True  # pyright: ignore[reportFunctionMemberAccess]
    return checked


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor. It does not import DTensor, which takes a second."""
    return hasattr(tensor, "device_mesh")


def local_shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def distribute_like(whole: Tensor, *, like: Tensor) -> Tensor:
    """`whole`, which all ranks have, on the device of `like` and with its placements."""
    if not is_dtensor(like):
        return whole.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    dtensor: Any = like
    return distribute_tensor(whole.to(like.device), dtensor.device_mesh, dtensor.placements, src_data_rank=None)
