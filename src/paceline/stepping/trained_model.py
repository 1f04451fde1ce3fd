"""A model in the steps of a training, and the loss scale for fp16."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.state import TensorShard
from paceline.collectives.buckets import trainable_parameters
from paceline.collectives.control import Deferred, resolve_deferred
from paceline.errors import UsageError
from paceline.stepping.hooks import (
    HiddenHooks,
    LastGradParameter,
    count_hooks,
    has_multi_grad_hook,
    hide_hooks,
    restore_hooks,
)
from paceline.stepping.nonfinite import gradients_are_finite
from paceline.strategies.base import Strategy

INITIAL_LOSS_SCALE = 2.0**16
LARGEST, SMALLEST = 2.0**24, 2.0**-14
STEPS_UNTIL_DOUBLED = 2000


def make_loss_scale(precision: str | None) -> "LossScale | None":
    """The initial scale; None if the precision needs none."""
    return LossScale() if precision == "fp16" else None


class LossScale:
    """The loss scale for fp16, in which gradients below 6e-8 become zeros, and above 65,504 infinite.

    Losses are multiplied before each backward of a step. Gradients are divided after their sum, together with the
    weight. All ranks check the same sums, so an overflow on one rank skips the step on all, and halves the scale. The
    scale is a power of two: it changes no bit of a gradient that is neither too small nor too large.
    """

    def __init__(self) -> None:
        self.value = INITIAL_LOSS_SCALE
        self.skipped = 0
        """steps of the run that have overflowed"""
        self._good = 0  # steps since the last change of the scale

    def halve_after_overflow(self, where: str) -> str:
        """Halve the scale after an overflow in the step `where`. Returns a message; empty at the smallest scale."""
        if self.value <= SMALLEST:
            return ""
        self.value, self._good, self.skipped = self.value / 2, 0, self.skipped + 1
        return f"a gradient is beyond fp16's range at {where}: the loss scale is now {self.value:g}"

    def count_good_step(self) -> None:
        self._good += 1
        if self._good == STEPS_UNTIL_DOUBLED and self.value < LARGEST:
            self.value, self._good = self.value * 2, 0

    def json_state(self) -> dict[str, Any]:
        return {"loss_scale": [self.value, self._good, self.skipped]}

    def load_json_state(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; it has none if it is of another precision."""
        self.value, self._good, self.skipped = saved.get("loss_scale", (INITIAL_LOSS_SCALE, 0, 0))


class ModelInTraining:
    """A model in training. Its gradients are summed in .grad over the micro-batches of a step."""

    aside: list[Tensor | None] | None = None
    """sums over the previous micro-batches of this step; they wait for the last one"""
    has_received_gradients = True
    """after a watched backward: whether any parameter got a gradient"""
    may_have_hooks = True
    """whether hooks may have been registered since `hide_hooks`"""
    adapters: Any = None
    """of peft, in a session: see `train.adapters`"""

    def __init__(self, replica: Strategy, number: int = 0, scale: LossScale | None = None) -> None:
        """`number` counts the models from 0; `scale`: of the losses."""
        self.replica, self.number, self.scale = replica, number, scale
        self.prefix = f"{number + 1}/" if number else ""  # of its tensors in a checkpoint
        self._parameters = trainable_parameters(replica.model)
        self._found: bool | Deferred[bool] | None = None
        self._hooked = False
        self.last_gradient = LastGradParameter()
        """of a session: a parameter that received a gradient in a backward of the loop"""
        self.norm: float | None = None
        """of the step's gradients before clipping"""
        self.hooks, self._own_hooks = 0, -1
        """hooks on its parameters: the user's, in the last backward; and of all, if none is the user's (else -1)"""

    def has_optimizer_among(self, numbers: Sequence[int]) -> bool:
        return self.number in numbers

    def begin_step(self) -> None:
        """Begin a step: save the buffers, clear the gradients."""
        self.replica.save_buffers()
        for parameter in self._parameters:  # not those of the optimizer: a sharded one has only its shards
            parameter.grad = None

    def before_backward(self, wanted: bool, watched: bool) -> None:
        """Before a backward: its gradients are dropped if not `wanted`; `watched`: sets `has_received_gradients`."""

    def backward(self, loss: Tensor, *, factor: float | Tensor = 1.0, retain_graph: bool = False) -> None:
        """Back-propagate a loss of all models, times a `factor`."""
        if self.scale is not None:
            factor = factor * self.scale.value
        if isinstance(factor, Tensor):
            gradient = factor.to(loss.dtype)
        else:  # torch makes a one
            gradient = None if factor == 1.0 else torch.full_like(loss, factor)
        loss.backward(gradient, retain_graph=retain_graph or None)

    def hide_hooks(self, *, alone: bool, counted: bool = True) -> HiddenHooks:
        """Remove the user's hooks from the parameters during a backward: they are for the global batch's gradient.

        `alone`: this backward computes all of it, so hooks of several parameters at once stay. `counted`: False for a
        dummy batch, during which parameters have hooks of paceline.
        """
        count = count_hooks(self._parameters)
        if count == self._own_hooks:
            self._hooked, self.hooks = False, 0
            return []
        hidden = hide_hooks(self._parameters)
        self.hooks = sum(len(before) + len(after) for _, before, after in hidden)
        are_joint = has_multi_grad_hook(self._parameters)
        self._own_hooks = -1 if hidden or are_joint or not counted else count
        if are_joint and (not alone or self.replica.sharded):
            restore_hooks(hidden)
            raise UsageError(code="multi-grad-hook")
        if hidden and self.replica.sharded:
            restore_hooks(hidden)
            raise UsageError(code="gradient-hook")
        self._hooked = bool(hidden)
        return hidden

    def record_grad_versions(self) -> None:
        """After a skipped step: remember that the loop did not write these gradients."""

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient, or may have a shard of one on another rank."""
        return self.replica.sharded or any(p.grad is not None for p in self._parameters)

    def run_hooks(self, *, after_accumulation: bool) -> None:
        """Run the user's hooks on the global batch's gradients, before they are added to `.grad` or after."""
        if not self._hooked:
            return
        hidden = hide_hooks(self._parameters)
        restore_hooks(hidden)
        for parameter, before, after in hidden:
            if parameter.grad is None:
                continue
            for hook in () if after_accumulation else before.values():
                changed = hook(parameter.grad)
                parameter.grad = parameter.grad if changed is None else changed
            for hook in after.values() if after_accumulation else ():
                hook(parameter)

    def begin_micro_batch(self) -> None:
        """Before a micro-batch that is not the last of its step."""

    def check_between_micro_batches(self) -> None:
        """Between two micro-batches of a step: raise UsageError for a gradient that is not the step's."""

    def set_gradients_aside(self, reached: bool) -> None:
        """After a backward that is not the step's last."""

    def discard_backward(self) -> None:
        """After a backward without gradients for this model: drop those it may have."""

    def sync_gradients(self, divisor: float | Tensor, *, agreed: bool) -> bool | Deferred[bool] | None:
        """After the step's last backward: .grad becomes the sum over all ranks, divided (a collective).

        `agreed`: hosts that step separately agree on the result. Returns the result of `Strategy.sync_gradients`.
        """
        self._found = self.replica.sync_gradients(divisor if self.scale is None else divisor * self.scale.value)
        if agreed and self.replica.local_step_node is not None:
            self._found = self.replica.check_finite_on_all_ranks()
        if self._hooked:
            self.run_hooks(after_accumulation=False)
            self._found = None  # a hook may have changed the gradients
        return self._found

    def clip_and_check_finite(self, max_norm: float | None) -> bool | Deferred[bool]:
        """After `sync_gradients`: clip gradients to `max_norm`, set `norm`, return whether all are finite."""
        finite, self._found = self._found, None  # it would hold the gradients until the next step
        self.norm = None
        if max_norm is None:
            return gradients_are_finite(self.replica) if finite is None else finite

        def made(norm: float) -> bool:  # the norm decides, unless a square has overflowed
            self.norm = norm
            return math.isfinite(norm) or resolve_deferred(gradients_are_finite(self.replica))

        return self.replica.clip_grad_norm(max_norm).map(made)

    def can_skip_on_device(self) -> bool:
        """Whether `Strategy.step_unless` can skip an update on this rank, if no hook is added in the next step."""
        return self.scale is None and not self._hooked and self.replica.can_skip_on_device()

    def clip_and_check_on_device(self, max_norm: float | None) -> list[Tensor]:
        """As `clip_and_check_finite`, but the host reads nothing.

        Returns (1,) each: 1 if a gradient is not finite, else 0; with `max_norm` the norm, and 0.
        """
        finite, self._found = self._found, None
        if max_norm is not None:
            norm = self.replica.clip_grad_norm_on_device(max_norm)
            return [torch.zeros(1, device=norm.device), norm]
        finite = gradients_are_finite(self.replica) if finite is None else finite
        if isinstance(finite, Deferred):
            return [finite.numbers]
        return [torch.full((1,), float(not finite), device=self.replica.world.device)]

    def abort_step(self) -> None:
        self.replica.restore_buffers()

    def state(self) -> list[TensorShard]:
        """All tensors of its state, under names with `prefix`."""
        return [replace(shard, name=self.prefix + shard.name) for shard in self.replica.state()]

    def learning_rates(self) -> list[float]:
        return [group["lr"] for group in self.replica.optimizer.param_groups]
