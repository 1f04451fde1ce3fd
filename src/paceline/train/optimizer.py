"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.strategies.base import MakeOptimizer


def optimizer_maker(
    name: Literal["adamw", "sgd"], *, lr: float, weight_decay: float = 0.0, momentum: float = 0.0
) -> MakeOptimizer:
    """A function that makes the optimizer from the parameters, as strategies want it.

    Fused at every world size: fused and unfused Adam differ in the last bits, so the choice must not depend on it.
    """

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        if name == "adamw":
            return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True)
        return torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay, momentum=momentum, fused=True)

    return make
