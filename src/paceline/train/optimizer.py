"""Optimizers by name, and the learning rate of every step as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Schedule:
    """Rises linearly over `warmup_steps`, then falls to 0 at `total_steps` as `shape` says (or stays)."""

    peak_lr: float
    total_steps: int
    warmup_steps: int = 0
    shape: Literal["cosine", "linear", "constant"] = "constant"

    def lr(self, step: int) -> float:
        """The learning rate of step 0, 1, 2, ... The first step of a warm-up is already above 0."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak_lr
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        if self.shape == "linear":
            return self.peak_lr * (1 - progress)
        return self.peak_lr * (1 + math.cos(math.pi * progress)) / 2


def scaled_lr(lr: float, rule: Literal["none", "linear", "sqrt"], global_batch: int, base_batch: int) -> float:
    """`lr`, meant for `base_batch`, for a step on `global_batch` samples.

    Linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD"; square root: usual for Adam-like optimizers.
    """
    ratio = global_batch / base_batch
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
