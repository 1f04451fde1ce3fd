"""Optimizers and schedules: by name, the learning rate then a pure function of the step; or as a task makes its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.errors import UsageError
from paceline.strategies.base import MakeOptimizer
from paceline.tasks.finding import imported
from paceline.tasks.task import Task
from paceline.train.numbers import load_numbers, numbers_of, settings_of

if TYPE_CHECKING:
    from paceline.config.settings import OptimizerConfig

OF_OPTIMIZER = ("optimizer", "lr", "weight_decay", "momentum", "lr_scaling", "lr_base_batch")
OF_SCHEDULE = ("schedule", "warmup_steps")


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


def maker_for(wish: OptimizerConfig, lr: float, task: Task, model: nn.Module) -> MakeOptimizer:
    """What makes the optimizer of `model`: the task's own function, else what `wish` names, at the peak rate `lr`.

    Raises:
        UsageError: no optimizer comes of it, or a setting would have no meaning beside it.
    """
    if task.make_schedule is not None or task.make_optimizer is not None:
        _refuse(wish, OF_SCHEDULE, "the task says its own schedule (Task.make_schedule)")
    if task.make_optimizer is not None:
        _refuse(wish, OF_OPTIMIZER, "the task makes its own optimizer (Task.make_optimizer)")
        made = checked_optimizer(task.make_optimizer(model))
        return lambda _: made
    if wish.optimizer == "adamw" or wish.optimizer == "sgd":
        return optimizer_maker(wish.optimizer, lr=lr, weight_decay=wish.weight_decay, momentum=wish.momentum)
    return _referenced(wish, lr)


def checked_optimizer(made: Any) -> Optimizer:
    """`made`, what a user's function has given.

    Raises:
        UsageError: it is no optimizer, or one that needs closures.
    """
    if isinstance(made, LBFGS):
        raise UsageError(code="optimizer-needs-closure")
    if not isinstance(made, Optimizer):
        raise UsageError(code="not-an-optimizer", kind=type(made).__name__)
    return made


def described(made: Optimizer) -> dict[str, Any]:
    """Its class, and of each group of parameters the settings and how many there are: as JSON that people can read."""
    groups = [{name: _plain(value) for name, value in settings.items()} for settings in settings_of(made)]
    counts = [{"parameters": len(group["params"])} for group in made.param_groups]
    return {"class": _full_name(made), "groups": [{**a, **b} for a, b in zip(counts, groups, strict=True)]}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _full_name(made: object) -> str:
    return f"{type(made).__module__}.{type(made).__qualname__}"


def _refuse(wish: OptimizerConfig, names: Iterable[str], why: str) -> None:
    """Refuse settings that were given although they would have no meaning."""
    defaults = {field.name: field.default for field in fields(wish)}
    for name in names:
        if getattr(wish, name) != defaults[name]:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(code="optimizer-option-unused", setting=flag, value=getattr(wish, name), reason=why)


def _referenced(wish: OptimizerConfig, lr: float) -> MakeOptimizer:
    make = imported(wish.optimizer)
    if not callable(make):
        raise UsageError(code="optimizer-not-found", value=wish.optimizer)
    takes, given = signature(make).parameters, {"lr": lr, "weight_decay": wish.weight_decay}
    if "lr" not in takes:
        raise UsageError(code="optimizer-without-lr", value=wish.optimizer)
    _refuse(wish, {"momentum", "weight_decay"} - (given.keys() & takes), f"{wish.optimizer} is not given it")

    def made(parameters: Iterable[nn.Parameter]) -> Optimizer:
        found = checked_optimizer(make(parameters, **{name: value for name, value in given.items() if name in takes}))
        if any(group["lr"] != lr for group in found.param_groups):
            raise UsageError(code="optimizer-sets-lr", value=wish.optimizer)
        return found

    return made


@dataclass(frozen=True)
class Schedule:
    """Rises linearly over `warmup_steps`, then falls to 0 at `total_steps` as `shape` says (or stays)."""

    peak_lr: float
    total_steps: int
    warmup_steps: int = 0
    shape: Literal["cosine", "linear", "constant"] = "constant"
    described: ClassVar[None] = None  # the run's settings say all

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

    def set(self, optimizer: Optimizer, step: int) -> float:
        """Give the optimizer the rate of step 0, 1, 2, ...; returns it."""
        lr = self.lr(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        return lr

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON: nothing, since the step says all."""
        return {}

    def load(self, found: Mapping[str, Any]) -> None:
        """Take over what `numbers` gave."""


class OwnSchedule:
    """As the task says: by a scheduler of torch, stepped after each update; without one, the optimizer's own rates."""

    def __init__(self, optimizer: Optimizer, scheduler: Any, total_steps: int) -> None:
        """UsageError for what cannot be stepped after each update."""
        if scheduler is not None and (
            not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau)
        ):
            raise UsageError(code="not-a-scheduler", kind=type(scheduler).__name__)
        self._optimizer = optimizer
        self._scheduler: Any = scheduler
        self.described = scheduler and {"class": _full_name(scheduler), "total_steps": total_steps}
        """what it is, as JSON"""
        if scheduler is not None:
            optimizer.register_step_post_hook(lambda *_: scheduler.step())
        self.numbers()  # what cannot be saved is told now

    def set(self, optimizer: Optimizer, step: int) -> float:
        """As Schedule: they are set already; returns that of the first group."""
        return float(optimizer.param_groups[0]["lr"])

    def numbers(self) -> dict[str, Any]:
        """As Schedule."""
        return numbers_of(self._optimizer, self._scheduler)

    def load(self, found: Mapping[str, Any]) -> None:
        """As Schedule."""
        load_numbers(self._optimizer, self._scheduler, found)


Rates = Schedule | OwnSchedule


def schedule_for(wish: OptimizerConfig, peak_lr: float, task: Task, optimizer: Optimizer, total_steps: int) -> Rates:
    """The task's own schedule, else what `wish` says.

    Raises:
        UsageError: the task has made none.
    """
    if task.make_schedule is not None:
        return OwnSchedule(optimizer, task.make_schedule(optimizer, total_steps), total_steps)
    if task.make_optimizer is not None:
        return OwnSchedule(optimizer, None, total_steps)
    return Schedule(peak_lr, total_steps, wish.warmup_steps, wish.schedule)


def scaled_lr(lr: float, rule: Literal["none", "linear", "sqrt"], global_batch: int, base_batch: int) -> float:
    """`lr`, meant for `base_batch`, for a step on `global_batch` samples.

    Linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD"; square root: usual for Adam-like optimizers.
    """
    ratio = global_batch / base_batch
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
