"""Several optimizers of one model as one."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from paceline.errors import UsageError


class OptimizerSequence(Optimizer):
    """Optimizers of different parameters of one model. It steps them in order; each keeps its state and its hooks."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        # Without Optimizer.__init__: `step` would run the hooks for steps of any optimizer a second time.
        self.optimizers, self.defaults = [*optimizers], {}
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        trained = [id(parameter) for group in self.param_groups for parameter in group["params"]]
        if len({*trained}) < len(trained):
            raise UsageError(code="parameters-trained-twice")

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizers[0].register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizers[-1].register_step_post_hook(hook)


def each_optimizer(optimizer: Optimizer) -> Sequence[Optimizer]:
    return optimizer.optimizers if isinstance(optimizer, OptimizerSequence) else [optimizer]


def parameters_by_optimizer(optimizer: Optimizer) -> list[list[nn.Parameter]]:
    return [[p for group in one.param_groups for p in group["params"]] for one in each_optimizer(optimizer)]


def format_optimizer_types(optimizer: Optimizer) -> str:
    return ", ".join(type(opt).__name__ for opt in each_optimizer(optimizer))


def can_skip_step_on_device(optimizer: Optimizer) -> bool:
    """Whether a step of `optimizer` with `found_inf` equal to 1 skips the update, and calls no code of the user."""
    own: Any = optimizer
    if type(optimizer) not in (Adam, AdamW, Adagrad, SGD) or "step" in vars(optimizer):
        return False
    return not (own._optimizer_step_pre_hooks or own._optimizer_step_post_hooks)


def changes_nothing_if_skipped(optimizer: Optimizer) -> bool:
    """Whether such a step changes nothing. The answer is the same on all ranks that have the same gradients.

    A step must not create state that a skipped step would not have. The first step of fused SGD with momentum also
    leaves its buffers uninitialized if it is skipped (torch 2.11 to 2.14).
    """
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.grad is not None]
        if not group["fused"] or any(p.grad.dtype != torch.float32 for p in trained):
            return False
        if type(optimizer) is not SGD:
            has_state = all(map(optimizer.state.__contains__, trained))
        else:
            momenta = (optimizer.state.get(p, {}).get("momentum_buffer") for p in trained)
            has_state = not group["momentum"] or all(momentum is not None for momentum in momenta)
        if not has_state:
            return False
    return True
