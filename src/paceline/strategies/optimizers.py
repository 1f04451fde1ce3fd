"""Several optimizers of one model as one."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

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
    return [[p for group in opt.param_groups for p in group["params"]] for opt in each_optimizer(optimizer)]


def optimizer_names(optimizer: Optimizer) -> str:
    return ", ".join(type(opt).__name__ for opt in each_optimizer(optimizer))
