"""A function that passes its input on. Its backward raises an error."""

import torch
from torch import Tensor


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("planted")
