"""A model with its optimizer and scheduler in a session: whose gradient is whose, and when they may act.

A loop body runs once for each of a rank's micro-batches of a global batch. What it computes for all but the last is
put aside where nobody can use it by mistake; `step` and the scheduler act at the last only:

    micro-batch    backward                                             .grad afterwards        step()
    not the last   adds to what is put aside                            as before, mostly None  does nothing
    the last       adds, and sums over ranks: the global batch's mean   that sum                updates

The objects stay the user's own. Only the methods that must wait are replaced on them, so isinstance, param_groups,
state_dict and schedulers that were made before all work.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.state import Held, Source, Under, needed
from paceline.errors import UsageError
from paceline.sessions.elsewhere import Elsewhere, is_cut, own_share, shared_out
from paceline.sessions.gate import Gate, trains_otherwise
from paceline.stepping.trainee import Trainee
from paceline.strategies.base import Replica
from paceline.sums import Pending
from paceline.train.numbers import as_json, load_numbers, numbers_of, settings_of

NO_OTHER_BACKWARD = (
    ". Or it was torch.autograd.grad, for a gradient penalty say: strategy 'fsdp' has the weights only for a moment, "
    "and cannot compute it. Use another strategy"
)
Grads = list[Tensor | None]


class Prepared(Trainee):
    """What `Session.prepare` was given, and the replica that a strategy has made of it."""

    def __init__(self, replica: Replica, scheduler: Any, number: int, gate: Gate) -> None:
        """`number` counts from 0; `gate` knows where in a step the loop is."""
        super().__init__(replica, number)
        self.optimizer, self.scheduler = replica.optimizer, scheduler
        self._aside: Grads | None = None  # of this step's micro-batches so far
        self._carried: Grads | None = None  # sums of this step's or an older batch's earlier backwards
        self._at_begin: Grads | None = None  # of a step that adds to the gradients of older batches
        self._used: Callable[[], Tensor | None] = lambda: None  # the first gradient, as the last update has left it
        self._used_version = 0
        self._adds_to_used = self._waiting = False
        """whether .grad has got something since the last update"""
        self._before: list[tuple[Tensor | None, int]] | None = None  # of a backward that is watched
        self._gate = gate
        self._update, self._clear = self.optimizer.step, self.optimizer.zero_grad
        self.optimizer.step = self._step  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.zero_grad = self._zero_grad  # pyright: ignore[reportAttributeAccessIssue]
        self._given = as_json(settings_of(self.optimizer))  # as the script has them
        if scheduler is not None:
            _held_back(scheduler, gate)
        replica.on_gradient(self._on_gradient)

        # no method: a copy of the model would copy what it belongs to
        def on_forward(module: nn.Module, _: Any) -> None:
            if replica.in_lockstep:
                gate.check_forward()
            if module is replica.model and module.training and gate.merged and otherwise:
                gate.notes.once(
                    "a model is evaluated in training mode, with dropout or a batch's own statistics: call model.eval()"
                )
            elif module is replica.model and not module.training and of_virtual_ranks:
                gate.check_evaluation()

        otherwise = trains_otherwise(replica.model)
        floating = any(buffer.is_floating_point() for buffer in replica.model.buffers())
        of_virtual_ranks = replica.virtual_ranks > 1 and floating
        if otherwise or of_virtual_ranks or replica.in_lockstep:
            replica.model.register_forward_pre_hook(on_forward)
        gate.parts.append(self)

    def begin(self) -> None:
        """A step begins."""
        self._at_begin = [p.grad for p in self._parameters] if self._waiting else None
        self.replica.keep_buffers()

    def open(self, wanted: bool, watched: bool) -> None:
        """Before a backward: what it gives is added to what is put aside; or dropped, where it is not `wanted`."""
        shown: Grads = [p.grad for p in self._parameters]
        if any(grad is not None for grad in shown):
            if any(isinstance(grad, Elsewhere) for grad in shown):
                raise UsageError(
                    "gradients of an earlier backward are still there: a strategy that cuts them over ranks cannot add "
                    "to them. Call optimizer.zero_grad() in each step; to add up several batches give "
                    "s.loader(..., accumulation=N), to add up several losses s.backward(loss, more=True)"
                )
            first = next(grad for grad in shown if grad is not None)
            as_used = self._used() is first and _version(first) == self._used_version
            self._adds_to_used = as_used or (self._adds_to_used and bool(own_share(first).any()))
            self._carried = shown
            self._put(None)
        elif self._carried is None:
            self._adds_to_used = False
        if wanted and self._aside is not None:
            self._put(self._aside)
        self._before = [(p.grad, _version(p.grad)) for p in self._parameters] if watched else None

    @property
    def reached(self) -> bool:
        """After a backward: whether it has given any of its parameters a gradient; True, where nobody watched."""
        if self._before is None:
            return True
        now = [(p.grad, _version(p.grad)) for p in self._parameters]
        pairs = zip(now, self._before, strict=True)
        return any(
            grad is not None and (grad is not before or version != then) for (grad, version), (before, then) in pairs
        )

    def close(self, reached: bool) -> None:
        """After a backward that is not the step's last; one that has not reached it leaves what is shown as it was."""
        now: Grads = [p.grad for p in self._parameters]
        self._aside = now if any(grad is not None for grad in now) else None
        self._put(None)
        if not reached:
            self.drop()

    def drop(self) -> None:
        """After a backward whose gradients this model does not want, or has not got: those before it are put back."""
        self._put(self._carried)
        self._carried = None

    @torch.no_grad()
    def synchronise(self, divisor: Tensor, *, agreed: bool) -> bool | Pending[bool] | None:
        """As `Trainee.synchronise`."""
        self._aside = None
        known = super().synchronise(divisor, agreed=agreed)
        self._waiting = True
        if self._carried is not None:
            for parameter, before in zip(self._parameters, self._carried, strict=True):
                if before is not None:
                    parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
            self._carried = known = self._found = None
        if self.replica.sharded and not any(map(is_cut, self._parameters)):
            for parameter in self._parameters:
                parameter.grad = Elsewhere.of(parameter)
        return known

    def give_up(self) -> None:
        """The step is given up: gradients and buffers are those before it."""
        self._aside = self._carried = None
        self._put(self._at_begin)
        self._waiting = self._at_begin is not None
        super().give_up()

    @property
    def has_aside(self) -> bool:
        """Whether gradients of this step wait for its last micro-batch."""
        return self._aside is not None

    def state(self) -> list[Held]:
        """All tensors of its state, under its own names."""
        # gradients that the loop adds up over several batches
        waiting = self.replica.gradients() if self._waiting else ()
        return super().state() + [replace(one, name=f"{self.prefix}gradient/{one.name}") for one in waiting]

    def load(self, source: Source) -> None:
        """Take over what `state` gave."""
        source = Under(source, self.prefix) if self.prefix else source
        self.replica.load(source)
        for name, parameter in self.replica.model.named_parameters():
            if f"gradient/{name}" in source.names(f"gradient/{name}"):
                parameter.grad = shared_out(needed(source, f"gradient/{name}", parameter), like=parameter)
                self._waiting = True

    def numbers(self) -> dict[str, Any]:
        """The rest of its state, as JSON: the optimizer's settings and the scheduler's numbers."""
        return {**numbers_of(self.optimizer, self.scheduler), "given": self._given}

    def load_numbers(self, found: Mapping[str, Any]) -> str:
        """Take over what `numbers` gave; what differs in the script now, in words."""
        changed = self._given != found["given"]
        load_numbers(self.optimizer, self.scheduler, found)
        return (
            f"optimizer {self.number + 1} keeps the checkpoint's settings, not those of the script" if changed else ""
        )

    def _put(self, grads: Grads | None) -> None:
        for parameter, grad in zip(self._parameters, grads or [None] * len(self._parameters), strict=True):
            parameter.grad = grad

    def _step(self, closure: Any = None) -> Any:
        if closure is not None and not type(self.optimizer).__module__.startswith("torch.optim."):
            raise UsageError(
                f"optimizer.step(closure): {type(self.optimizer).__name__} may call it several times in a step. Only "
                "torch's own optimizers, which call it once, take one here: call s.backward(loss), then step()"
            )
        loss = closure() if closure is not None else None
        self.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        if self._gate.may_update(self):
            if self._adds_to_used:
                self._gate.notes.once(
                    "optimizer.step() without zero_grad() since the last: the gradients of older batches are added"
                )
            shown: Grads = [p.grad for p in self._parameters]
            self._update()
            self._put(shown)  # a strategy that cuts gradients lets them go
            self._waiting, first = False, next((grad for grad in shown if grad is not None), None)
            if first is not None:
                self._used, self._used_version = weakref.ref(first), _version(first)
        return loss

    _step._wrapped_by_lr_sched = True  # pyright: ignore[reportFunctionMemberAccess] - or torch's schedulers complain

    def _zero_grad(self, set_to_none: bool = True) -> None:
        # also before the last micro-batch: what is put aside is out of its reach
        self._adds_to_used = self._waiting = False
        self._clear(set_to_none=set_to_none)
        self.replica.model.zero_grad(set_to_none=set_to_none)

    def _on_gradient(self) -> None:
        if not self._gate.in_backward:
            raise UsageError(
                "loss.backward() has reached a prepared model: its gradient would stay on this rank. Call "
                f"s.backward(loss){self.replica.in_lockstep * NO_OTHER_BACKWARD}"
            )


def _held_back(scheduler: Any, gate: Gate) -> None:
    """Let `scheduler.step` wait for the end of a step. By its class: whatever hangs on it is saved with its state."""
    kind: Any = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.step(self, *args, **kwargs) if gate.is_over else None

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})


def _version(grad: Tensor | None) -> int:
    return -1 if grad is None else own_share(grad)._version  # pyright: ignore[reportPrivateUsage]
