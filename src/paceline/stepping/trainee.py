"""A model in the steps of a training, as a step sees it."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.checkpoint.state import TensorShard
from paceline.collectives.buckets import trainable
from paceline.collectives.control import Pending, sent, sum_over_ranks
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.stepping.hooks import HiddenHooks, count_hooks, have_joint_hooks, hide_hooks, show_hooks
from paceline.stepping.nonfinite import NotFinite, gradients_are_finite
from paceline.stepping.scaling import LossScale
from paceline.strategies.base import Replica


class Trainee:
    """Whose gradients nobody looks at between two micro-batches: they are added up in .grad."""

    has_aside = False
    """whether gradients of this step wait for its last micro-batch"""
    reached = True
    """after a backward that was watched: whether it has given any of its parameters a gradient"""

    def __init__(self, replica: Replica, number: int = 0, scale: LossScale | None = None) -> None:
        """`number` counts from 0; `scale` is that of the losses."""
        self.replica, self.number, self.scale = replica, number, scale
        self.prefix = f"{number + 1}/" if number else ""  # of its tensors in a checkpoint
        self._parameters = trainable(replica.model)
        self._found: bool | Pending[bool] | None = None
        self._hooked = False
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

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Back-propagate a loss of the step, of all models."""
        (loss if self.scale is None else loss * self.scale.value).backward(retain_graph=retain_graph or None)

    def hide_hooks(self, *, alone: bool) -> HiddenHooks:
        """Take the user's hooks off the parameters during a backward: they are for the global batch's gradient.

        `alone`: this backward gives all of it, so hooks of several parameters at once stay.

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
        self._own_hooks = -1 if hidden or are_joint else count
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

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has one, or may have its share on another rank."""
        return self.replica.sharded or any(p.grad is not None for p in self._parameters)

    @torch.no_grad()
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
        `Replica.sync_gradients` does.
        """
        self._found = self.replica.sync_gradients(divisor if self.scale is None else divisor * self.scale.value)
        if agreed and self.replica.all_finite is not None:
            self._found = self.replica.all_finite()
        if self._hooked:
            self.run_hooks(after_accumulation=False)
            self._found = None  # a hook may have changed that
        return self._found

    def judged(self, max_norm: float | None) -> Pending[tuple[bool, float | None]]:
        """After `synchronise`: (are all gradients finite? their norm, if they are clipped, to `max_norm`)."""
        found, self._found = self._found, None  # it would hold the gradients until the next step has its own
        if max_norm is None:
            found = found if isinstance(found, Pending) else gradients_are_finite(self.replica)
            return found.then(lambda finite: (finite, None))

        def made(norm: float) -> tuple[bool, float]:  # the norm is the vote, unless a square was beyond its type
            return math.isfinite(norm) or gradients_are_finite(self.replica).now(), norm

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


def reached_anywhere(wanted: Sequence[Trainee], world: World) -> list[Trainee]:
    """Those whose parameters a watched backward has reached on any rank; the others are closed (a collective)."""
    flags = sent([float(part.reached) for part in wanted], world.device)
    found = sum_over_ranks(flags, "models reached by a backward").tolist()
    for part, ranks in zip(wanted, found, strict=True):
        if not ranks:
            part.close(reached=False)
    return [part for part, ranks in zip(wanted, found, strict=True) if ranks]


def check_summed_once(before: Sequence[Trainee], now: Sequence[Trainee]) -> None:
    """Raise UsageError if the gradients of one model are summed over ranks a second time in a step."""
    if any(part in before for part in now):
        raise UsageError(code="two-backwards")
