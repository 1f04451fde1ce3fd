"""A model in the steps of a training, as a step sees it, and the scale of its losses in fp16."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.state import TensorShard
from paceline.collectives.buckets import trainable
from paceline.collectives.control import Pending, now, sent, sum_over_ranks
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.stepping.hooks import HiddenHooks, count_hooks, have_joint_hooks, hide_hooks, show_hooks
from paceline.stepping.nonfinite import NotFinite, gradients_are_finite
from paceline.strategies.base import Strategy

FIRST = 2.0**16
LARGEST, SMALLEST = 2.0**24, 2.0**-14
STEPS_UNTIL_DOUBLED = 2000


def loss_scale(precision: str) -> "LossScale | None":
    """The scale to begin with, where there is one."""
    return LossScale() if precision == "fp16" else None


class LossScale:
    """The loss scale for fp16: gradients below 6e-8 would be zeros there, and above 65,504 infinite.

    Losses are scaled before each backward of a step, and gradients after their sum, where they are divided by the
    weight anyway. All ranks judge the same sums, so an overflow on one skips the step on all, and halves the scale. It
    is a power of two: it changes no bit of a gradient that is neither too small nor too large, at any world size.
    """

    def __init__(self) -> None:
        self.value = FIRST
        self.left_out = 0
        """steps of the run that have overflowed"""
        self._good = 0  # steps since the scale has changed

    def overflow(self, where: str) -> str:
        """Halve the scale, as gradients of the step at `where` are not finite; in words, empty where it cannot help."""
        if self.value <= SMALLEST:
            return ""
        self.value, self._good, self.left_out = self.value / 2, 0, self.left_out + 1
        return f"a gradient is beyond fp16's range at {where}: the loss scale is now {self.value:g}"

    def good(self) -> None:
        """A step was taken."""
        self._good += 1
        if self._good == STEPS_UNTIL_DOUBLED and self.value < LARGEST:
            self.value, self._good = self.value * 2, 0

    def numbers(self) -> dict[str, Any]:
        """What `take` goes on with."""
        return {"loss_scale": [self.value, self._good, self.left_out]}

    def take(self, found: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; one of another precision has no scale."""
        self.value, self._good, self.left_out = found.get("loss_scale", (FIRST, 0, 0))


class TrainedModel:
    """A model in training. Its gradients are added up in .grad over the micro-batches of a step."""

    has_aside = False
    """whether gradients of this step wait for its last micro-batch"""
    reached = True
    """after a backward that was watched: whether it has given any of its parameters a gradient"""

    def __init__(self, replica: Strategy, number: int = 0, scale: LossScale | None = None) -> None:
        """`number` counts from 0; `scale` is that of the losses."""
        self.replica, self.number, self.scale = replica, number, scale
        self.prefix = f"{number + 1}/" if number else ""  # of its tensors in a checkpoint
        self._parameters = trainable(replica.model)
        self._found: bool | Pending[bool] | None = None
        self._hooked = False
        self.norm: float | None = None
        """of the step's gradients before they were clipped"""
        self.hooks, self._own_hooks = 0, -1
        """hooks on its parameters: the user's, in the last backward; and of all, if none is the user's (else -1)"""

    def has_stepped(self, numbers: Sequence[int]) -> bool:
        """Whether an optimizer of its own is among those, by number, that were asked to step."""
        return self.number in numbers

    def begin(self) -> None:
        """A step begins."""
        self.replica.keep_buffers()
        for parameter in self._parameters:  # not the optimizer's: one that is sharded knows only its share
            parameter.grad = None

    def open(self, wanted: bool, watched: bool) -> None:
        """Before a backward: what it gives is dropped, where it is not `wanted`; `watched`: `reached` will be asked."""

    def backward(self, loss: Tensor, *, factor: float | Tensor = 1.0, retain_graph: bool = False) -> None:
        """Back-propagate a loss of the step, of all models, times a `factor`."""
        if self.scale is not None:
            factor = factor * self.scale.value
        if isinstance(factor, Tensor):
            gradient = factor.to(loss.dtype)
        else:  # torch makes a one
            gradient = None if factor == 1.0 else torch.full_like(loss, factor)
        loss.backward(gradient, retain_graph=retain_graph or None)

    def hide_hooks(self, *, alone: bool, counted: bool = True) -> HiddenHooks:
        """Take the user's hooks off the parameters during a backward: they are for the global batch's gradient.

        `alone`: this backward gives all of it, so hooks of several parameters at once stay. `counted`: it is that of no
        dummy batch, during which parameters have hooks of paceline.

        Raises:
            UsageError: if there are any, and ranks hold shares of gradients; or hooks of several parameters at once.
        """
        count = count_hooks(self._parameters)
        if count == self._own_hooks:
            self._hooked, self.hooks = False, 0
            return []
        hidden = hide_hooks(self._parameters)
        self.hooks = sum(len(before) + len(after) for _, before, after in hidden)
        are_joint = have_joint_hooks(self._parameters)
        self._own_hooks = -1 if hidden or are_joint or not counted else count
        if are_joint and (not alone or self.replica.sharded):
            show_hooks(hidden)
            raise UsageError(code="multi-grad-hook")
        if hidden and self.replica.sharded:
            show_hooks(hidden)
            raise UsageError(code="gradient-hook")
        self._hooked = bool(hidden)
        return hidden

    def show_hooks(self, hidden: HiddenHooks) -> None:
        """Put them back, after backward."""
        if hidden:
            show_hooks(hidden)

    def note_gradients(self) -> None:
        """A step is left out: note that the gradients are not the loop's."""

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has one, or may have its share on another rank."""
        return self.replica.sharded or any(p.grad is not None for p in self._parameters)

    def run_hooks(self, *, after_accumulation: bool) -> None:
        """Run the user's hooks on the global batch's gradients, before they are added to `.grad` or after."""
        if not self._hooked:
            return
        hidden = hide_hooks(self._parameters)
        show_hooks(hidden)
        for parameter, before, after in hidden:
            if parameter.grad is None:
                continue
            for hook in () if after_accumulation else before.values():
                changed = hook(parameter.grad)
                parameter.grad = parameter.grad if changed is None else changed
            for hook in after.values() if after_accumulation else ():
                hook(parameter)

    def overflowed(self, where: str) -> NotFinite | None:
        """Whether gradients of the step at `where` that are not finite are the loss scale's fault; halves it."""
        words = "" if self.scale is None else self.scale.overflow(where)
        return NotFinite(words, by_scale=True) if words else None

    def check_between(self) -> None:
        """Between two micro-batches of a step: raise UsageError for a gradient that is not the step's."""

    def close(self, reached: bool) -> None:
        """After a backward that is not the step's last."""

    def drop(self) -> None:
        """After a backward whose gradients this model does not want, or has not got."""

    def synchronise(self, divisor: float | Tensor, *, agreed: bool) -> bool | Pending[bool] | None:
        """After the step's last backward: .grad becomes the sum over all ranks, divided (a collective).

        `agreed`: hosts that step by themselves ask each other, so that all return the same. Returns what
        `Strategy.sync_gradients` does.
        """
        self._found = self.replica.sync_gradients(divisor if self.scale is None else divisor * self.scale.value)
        if agreed and self.replica.host is not None:
            self._found = self.replica.all_finite()
        if self._hooked:
            self.run_hooks(after_accumulation=False)
            self._found = None  # a hook may have changed that
        return self._found

    def judged(self, max_norm: float | None) -> bool | Pending[bool]:
        """After `synchronise`: whether all gradients are finite, which are clipped to `max_norm`; sets `norm`."""
        found, self._found = self._found, None  # it would hold the gradients until the next step has its own
        self.norm = None
        if max_norm is None:
            return gradients_are_finite(self.replica) if found is None else found

        def made(norm: float) -> bool:  # the norm is the vote, unless a square was beyond its type
            self.norm = norm
            return math.isfinite(norm) or now(gradients_are_finite(self.replica))

        return self.replica.clip_grad_norm(max_norm).then(made)

    def give_up(self) -> None:
        """The step is given up: buffers are those before it."""
        self.replica.put_back_buffers()

    def state(self) -> list[TensorShard]:
        """All tensors of its state, under its own names."""
        return [replace(one, name=self.prefix + one.name) for one in self.replica.state()]

    def rates(self) -> list[float]:
        """The learning rates as they are."""
        return [group["lr"] for group in self.replica.optimizer.param_groups]


def reached_anywhere(wanted: Sequence[TrainedModel], world: World) -> list[TrainedModel]:
    """Those whose parameters a watched backward has reached on any rank; the others are closed (a collective)."""
    flags = sent([float(part.reached) for part in wanted], world.device)
    found = sum_over_ranks(flags, "models reached by a backward").tolist()
    for part, ranks in zip(wanted, found, strict=True):
        if not ranks:
            part.close(reached=False)
    return [part for part, ranks in zip(wanted, found, strict=True) if ranks]


def check_summed_once(before: Sequence[TrainedModel], now: Sequence[TrainedModel]) -> None:
    """Raise UsageError if the gradients of one model are summed over ranks a second time in a step."""
    if any(part in before for part in now):
        raise UsageError(code="two-backwards")
