"""Optimizers that need whole parameters."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from paceline.strategies.optimizers import OptimizerSequence


def muon_and_adamw(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """Muon for matrices, AdamW for all others."""
    every = [*parameters]
    others = AdamW([p for p in every if p.ndim != 2], lr=lr, weight_decay=0.1)
    return OptimizerSequence([Muon([p for p in every if p.ndim == 2], lr=lr), others])


class Shampoo(Optimizer):
    """Divides a gradient by the sums of its products, which are new in every second step. paceline does not know it."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.every = 2

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self._direction(parameter, self.state[parameter]), alpha=group["lr"])

    def _direction(self, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        matrix = gradient.reshape(len(gradient), -1) if gradient.ndim else gradient.view(1, 1)
        if not state:
            state.update(calls=0, products=torch.eye(len(matrix), dtype=matrix.dtype), divisor=matrix.new_zeros(()))
        state["products"] += matrix @ matrix.T
        if state["calls"] % self.every == 0:
            state["divisor"] = torch.linalg.inv(state["products"])
        state["calls"] += 1
        return (state["divisor"] @ matrix).view(gradient.shape)


class Joint(Optimizer):
    """Divides by the norm of all gradients, from step `first` on."""

    def __init__(self, parameters: Iterable[nn.Parameter], first: int = 0) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.first, self.count = first, 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in trained if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients) if self.count >= self.first and gradients else 1.0
        self.count += 1
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.sub_(gradient / norm * self.param_groups[0]["lr"])
