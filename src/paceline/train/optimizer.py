"""Optimizers and learning rate schedules: by name, as in the settings, or made by functions of the task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from inspect import signature
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.errors import UsageError
from paceline.strategies.base import MakeOptimizer
from paceline.strategies.optimizers import OptimizerSequence, each_optimizer
from paceline.train.json_values import hyperparameters_json, load_hyperparameters_json, param_group_settings

if TYPE_CHECKING:
    from paceline.config.settings import OptimizerConfig
    from paceline.tasks.task import Task

OPTIMIZER_SETTINGS = ("optimizer", "lr", "weight_decay", "momentum", "lr_scaling", "lr_base_batch")
SCHEDULE_SETTINGS = ("schedule", "warmup_steps")


def optimizer_maker(
    name: Literal["adamw", "sgd"], *, lr: float, weight_decay: float = 0.0, momentum: float = 0.0
) -> MakeOptimizer:
    """Return a function that makes the optimizer from the parameters, for a strategy.

    The optimizer is fused at every world size, because fused and unfused Adam differ in the last bits.

    Args:
        name: "adamw" or "sgd".
        lr: learning rate.
        weight_decay: decoupled from the gradient with adamw; an L2 penalty with sgd.
        momentum: of sgd. Not used by adamw.

    Returns:
        A function (parameters) -> optimizer, to pass to an entry of `STRATEGIES`.
    """
    if name == "adamw":
        return partial(torch.optim.AdamW, lr=lr, weight_decay=weight_decay, fused=True)
    return partial(torch.optim.SGD, lr=lr, weight_decay=weight_decay, momentum=momentum, fused=True)


def configured_optimizer_maker(config: OptimizerConfig, lr: float, task: Task, model: nn.Module) -> MakeOptimizer:
    if task.make_schedule is not None or task.make_optimizer is not None:
        _refuse(config, SCHEDULE_SETTINGS, "the task defines the schedule (Task.make_schedule)")
    if task.make_optimizer is not None:
        _refuse(config, OPTIMIZER_SETTINGS, "the task defines the optimizer (Task.make_optimizer)")
        optimizer = as_single_optimizer(task.make_optimizer(model))
        return lambda _: optimizer
    if config.optimizer == "adamw" or config.optimizer == "sgd":
        return optimizer_maker(config.optimizer, lr=lr, weight_decay=config.weight_decay, momentum=config.momentum)
    return _imported_maker(config, lr)


def as_single_optimizer(optimizer: Any) -> Optimizer:
    """Return `optimizer`, the result of a user's function. Several optimizers become a sequence."""
    if isinstance(optimizer, (list, tuple)) and optimizer:
        return OptimizerSequence(map(as_single_optimizer, optimizer))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(optimizer, LBFGS):
        raise UsageError(code="optimizer-needs-closure")
    if not isinstance(optimizer, Optimizer):
        raise UsageError(code="not-an-optimizer", kind=type(optimizer).__name__)
    return optimizer


def describe_optimizer_as_json(optimizer: Optimizer) -> dict[str, Any]:
    """Describe an optimizer as readable JSON: its class, and the settings and size of each parameter group."""
    groups = [{name: _plain(value) for name, value in settings.items()} for settings in param_group_settings(optimizer)]
    counts = [{"parameters": len(group["params"])} for group in optimizer.param_groups]
    names = ", ".join(map(_full_name, each_optimizer(optimizer)))
    return {"class": names, "groups": [{**a, **b} for a, b in zip(counts, groups, strict=True)]}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _full_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _refuse(config: OptimizerConfig, names: Iterable[str], why: str) -> None:
    defaults = {field.name: field.default for field in fields(config)}
    for name in names:
        if getattr(config, name) != defaults[name]:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(code="optimizer-option-unused", setting=flag, value=getattr(config, name), reason=why)


def _imported_maker(config: OptimizerConfig, lr: float) -> MakeOptimizer:
    from paceline.tasks.finding import import_object  # a session needs none of it

    make = import_object(config.optimizer)
    if not callable(make):
        raise UsageError(code="optimizer-not-found", value=config.optimizer)
    parameter_names, settings = signature(make).parameters, {"lr": lr, "weight_decay": config.weight_decay}
    if "lr" not in parameter_names:
        raise UsageError(code="optimizer-without-lr", value=config.optimizer)
    arguments = {name: value for name, value in settings.items() if name in parameter_names}
    _refuse(config, {"momentum", "weight_decay"} - arguments.keys(), f"paceline does not pass it to {config.optimizer}")

    def make_checked(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = as_single_optimizer(make(parameters, **arguments))
        if any(group["lr"] != lr for group in optimizer.param_groups):
            raise UsageError(code="optimizer-sets-lr", value=config.optimizer)
        return optimizer

    return make_checked


@dataclass(frozen=True)
class Schedule:
    """A linear warm-up over `warmup_steps`, then a decay of the given `shape` to 0 at `total_steps`."""

    peak_lr: float
    """The learning rate at the end of the warm-up."""
    total_steps: int
    """The number of steps in the run."""
    warmup_steps: int = 0
    """The number of steps of the warm-up. 0: no warm-up."""
    shape: Literal["cosine", "linear", "constant"] = "constant"
    """How the rate decays after the warm-up. "constant": it stays at `peak_lr`."""
    described: ClassVar[None] = None  # the settings of the run describe it completely

    def lr(self, step: int) -> float:
        """The learning rate of a step. The rate of the first warm-up step is above 0.

        Args:
            step: from 0.
        """
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak_lr
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        if self.shape == "linear":
            return self.peak_lr * (1 - progress)
        return self.peak_lr * (1 + math.cos(math.pi * progress)) / 2

    def set_lr(self, optimizer: Optimizer, step: int) -> float:
        """Set the learning rate of all parameter groups for a step, and return it.

        Args:
            optimizer: a torch optimizer.
            step: from 0.
        """
        lr = self.lr(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        return lr

    def json_state(self) -> dict[str, Any]:
        """The state in a checkpoint: empty, because the rate depends on the step only."""
        return {}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Restore the result of `json_state`: nothing, because the rate depends on the step only.

        Args:
            numbers: the state of the checkpoint.
        """


class TaskSchedule:
    def __init__(
        self, optimizer: Optimizer, make_schedule: Callable[[Optimizer, int], Any] | None, total_steps: int
    ) -> None:
        self._optimizers, self._schedulers = each_optimizer(optimizer), list[Any]()
        for opt in self._optimizers:
            if make_schedule is None:
                continue
            scheduler = make_schedule(opt, total_steps)
            if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
                raise UsageError(code="not-a-scheduler", kind=type(scheduler).__name__)
            opt.register_step_post_hook(lambda *_, scheduler=scheduler: scheduler.step())
            self._schedulers.append(scheduler)
        names = ", ".join(map(_full_name, self._schedulers))
        self.described = {"class": names, "total_steps": total_steps} if names else None
        """A description as JSON; None without a scheduler."""
        self.json_state()  # raises an error now, not at the first checkpoint, if a value cannot be saved

    def set_lr(self, optimizer: Optimizer, step: int) -> float:
        return float(optimizer.param_groups[0]["lr"])  # the scheduler has already set all rates

    def json_state(self) -> dict[str, Any]:
        first, *others = (hyperparameters_json(*pair) for pair in self._pairs())
        return {**first, "others": others} if others else first

    def load(self, numbers: Mapping[str, Any]) -> None:
        for pair, saved in zip(self._pairs(), [numbers, *numbers.get("others", ())], strict=True):
            load_hyperparameters_json(*pair, saved)

    def _pairs(self) -> Iterable[tuple[Optimizer, Any]]:
        return zip_longest(self._optimizers, self._schedulers)


LRSchedule = Schedule | TaskSchedule


def make_lr_schedule(
    config: OptimizerConfig, peak_lr: float, task: Task, optimizer: Optimizer, total_steps: int
) -> LRSchedule:
    if task.make_schedule is not None:
        return TaskSchedule(optimizer, task.make_schedule, total_steps)
    if task.make_optimizer is not None:
        return TaskSchedule(optimizer, None, total_steps)
    return Schedule(peak_lr, total_steps, config.warmup_steps, config.schedule)


def scaled_lr(lr: float, rule: Literal["none", "linear", "sqrt"], global_batch: int, base_batch: int) -> float:
    """Scale `lr`, which was chosen for `base_batch` samples per step, to `global_batch` samples.

    Linear scaling: Goyal et al. 2017, "Accurate, Large Minibatch SGD". The square root is common for Adam.
    """
    ratio = global_batch / base_batch
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
