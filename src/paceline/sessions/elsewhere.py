"""What stands in .grad where ranks hold shares of a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError


class Elsewhere(torch.Tensor):
    """Stands for a gradient that ranks hold in shares: whoever computes with it would compute with nothing."""

    @staticmethod
    def of(parameter: Tensor) -> Tensor:
        """In place of the gradient of `parameter`."""
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            Elsewhere, parameter.shape, dtype=parameter.dtype, device=parameter.device, strides=parameter.stride()
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Whatever it is, refuse."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise UsageError(
            f"{func} on a gradient that is cut over ranks: under this strategy each rank holds a share of it only. To "
            "clip, call s.clip_grad_norm(max_norm)"
        )
