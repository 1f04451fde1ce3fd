"""Finds the rank, the step and the batch that made gradients NaN or infinite with which an optimizer steps.

A NaN anywhere goes back to the parameters near the input, so one small parameter there tells: its gradient as this
rank alone has it, before DDP adds up those of all ranks, and as the optimizer gets it. Only what is applied counts: who
looks for it and leaves the step out, as GradScaler does, has done right. Who puts other numbers into its gradients and
steps has not: what the forward pass has left, statistics of a batch norm, say, is not finite all the same.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from paceline.protocol.evidence import ScriptFinding
from paceline.protocol.marks import put_finding
from paceline.protocol.status_page import StatusPage
from paceline.rank.probes.hooks import Events
from paceline.rank.probes.later import Later, may_compute
from paceline.rank.probes.steps import Counted
from paceline.rank.sites import user_site

SMALL = 16384  # elements; where there is no such parameter, so many are looked at of the first
MOST_NAMED = 8  # samples
ONE_AHEAD = "/accelerate/data_loader.py"  # its loaders are those of the Trainer, too
PREFETCHER = "_PrefetchDataFetcher"  # Lightning's, which is one ahead where it cannot ask for the number of batches
_UNKNOWN = object()


class Batches(Events):
    """Which batch the script has; a framework may have taken the next one already, to see whether there is one."""

    def __init__(self) -> None:
        self._drawn: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()
        self._number: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._epochs: dict[weakref.ref[Any], int] = {}
        self._ahead: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # taken for a framework, one ahead?
        self._next: tuple[int, int, Any] | None = None
        self._last: tuple[int, int, Any] | None = None

    def epoch_begins(self, batches: Any) -> None:
        loader = batches.of_loader
        self._epochs[loader] = self._epochs.get(loader, 0) + 1
        self._number[batches] = 0
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame is not None and not self._ahead.get(batches, False):
            prefetches = type(frame.f_locals.get("self")).__name__ == PREFETCHER and not _is_sized(loader())
            self._ahead[batches] = prefetches or frame.f_code.co_filename.endswith(ONE_AHEAD)
            frame = frame.f_back

    def indices_drawn(self, batches: Any, indices: Any) -> None:
        self._drawn.setdefault(batches, deque()).append(indices)

    def batch_given(self, batches: Any, batch: Any) -> None:
        drawn, number = self._drawn.get(batches), self._number.get(batches, 0) + 1
        self._number[batches] = number
        indices = drawn.popleft() if drawn else []
        given = (number, self._epochs.get(batches.of_loader, 1), indices)
        self._last = self._next if self._ahead.get(batches) and number > 1 else given
        self._next = given

    def epoch_ended(self, batches: Any) -> None:
        """The last one has nothing ahead of it."""
        if self._next is not None:
            self._last = self._next

    def last(self) -> str:
        """The one that it was given last, in words."""
        if self._last is None:
            return ""
        number, epoch, indices = self._last
        drawn: list[Any] = [*indices] if isinstance(indices, Iterable) else [indices]
        samples = [one for one in drawn if one is not None]  # a stream has no indices
        named = ", ".join(str(one) for one in samples[:MOST_NAMED]) + (", ..." if len(samples) > MOST_NAMED else "")
        return f", batch {number} of epoch {epoch}" + (f", samples {named}" if samples else "")


class Finite(Events):
    """Of this process's optimizers."""

    def __init__(self, box: StatusPage, steps: Counted, batches: Batches) -> None:
        self._box, self._steps, self._batches, self._later = box, steps, batches, Later()
        self._sensors: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # optimizer -> its parameter near the input
        self._hooked: dict[int, weakref.ref[Any]] = {}  # tensors are equal by their elements: here by their address
        self._own: dict[int, str] = {}  # step -> what was not finite on this rank alone
        self._lost: dict[int, str] = {}  # step -> its last loss, where that was not finite
        self._follows = False  # the last loss was computed by parameters that were not finite: it is nobody's own
        self._again: WeakSet[Any] = WeakSet()  # optimizers that have called the closure of their step again
        self._hidden = False
        self._said = False

    def replica_made(self, ddp: Any) -> None:
        named = [(name, one) for name, one in ddp.module.named_parameters() if one.requires_grad]
        if named:
            name, sensor = next((one for one in named[:8] if one[1].numel() <= SMALL), named[0])
            self._hook(sensor, name)

    def backward_begins(self, losses: Any) -> None:
        self._later.look()
        loss = losses if hasattr(losses, "numel") else next(iter(losses), None)
        self._follows = False
        if loss is None or loss.numel() != 1 or not may_compute(loss):
            return
        step, words, site = self._steps.done + 1, self._batches.last(), user_site()
        at = f" at {site}" if site else ""

        def look(values: list[float]) -> None:
            self._lost.pop(step, None)
            self._follows = any(values[1:])
            if not math.isfinite(values[0]) and not self._follows:
                self._lost[step] = f"a loss of {values[0]}{at}{words}"
                self._own.setdefault(step, f"its loss was {values[0]}{at}{words}")

        torch = sys.modules["torch"]
        sensors: list[Any] = [known() for known in self._hooked.values()]
        here = (one for one in sensors if type(one) is torch.nn.Parameter and one.device == loss.device)
        spoilt = [_not_finite(one).double() for one in here]
        self._later.read(torch.cat([loss.detach().reshape(1).double(), *spoilt]), look)

    def step_begins(self, optimizer: Any) -> None:
        if self._said or getattr(optimizer, "found_inf", None) is not None:  # GradScaler has looked itself
            return
        sensor = self._sensors.get(optimizer, _UNKNOWN)
        sensor = self._chosen(optimizer) if sensor is _UNKNOWN else sensor
        if sensor is None or sensor.grad is None or sensor.grad.is_sparse or not may_compute(sensor.grad):
            return
        step = self._steps.done + 1
        self._own, self._lost = _since(step - 4, self._own), _since(step - 4, self._lost)

        def look(values: list[bool]) -> None:
            if values[0] and not self._said:
                self._tell(step)
            elif (lost := self._lost.pop(step, "")) and not self._hidden:
                self._hidden = True
                put_finding(self._box, ScriptFinding("swallowed", step, lost))

        self._later.read(_not_finite(sensor.grad), look)

    def closure_ended(self, optimizer: Any) -> None:
        self._again.add(optimizer)

    def step_ended(self, optimizer: Any) -> None:
        """A line search may leave a point that is not finite: here only what has gone into the parameters counts."""
        sensor = self._sensors.get(optimizer)
        if self._said or optimizer not in self._again or sensor is None or not may_compute(sensor):
            return
        self._again.discard(optimizer)
        step = self._steps.done + 1

        def look(values: list[bool]) -> None:
            if values[0] and not self._said:
                self._tell(step)

        self._later.read(_not_finite(sensor), look)

    def _tell(self, step: int) -> None:
        self._said, own = True, self._own.get(step)
        put_finding(self._box, ScriptFinding("not finite", step, own or "", own=own is not None))

    def _chosen(self, optimizer: Any) -> Any:
        """One of the first parameters, those near the input; a small one."""
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        hooked = next((one for one in parameters if (known := self._hooked.get(id(one))) and known() is one), None)
        if parameters and hooked is None:
            hooked = next((one for one in parameters[:8] if one.numel() <= SMALL), parameters[0])
            self._hook(hooked, "a parameter")
        self._sensors[optimizer] = hooked
        return hooked

    def _hook(self, sensor: Any, name: str) -> None:
        def seen(gradient: Any) -> None:
            if gradient.is_sparse or not may_compute(gradient):
                return
            step, words = self._steps.done + 1, self._batches.last

            def look(values: list[bool]) -> None:
                if values[0] and not self._follows:
                    self._own.setdefault(step, f"its own gradient of {name} was not finite{words()}")

            self._later.read(_not_finite(gradient), look)

        self._hooked[id(sensor)] = weakref.ref(sensor)
        sensor.register_hook(seen)


def _since(step: int, told: dict[int, str]) -> dict[int, str]:
    return {at: words for at, words in told.items() if at >= step}


def _not_finite(gradient: Any) -> Any:
    return _few(gradient).sum().isfinite().logical_not().reshape(1)


def _few(tensor: Any) -> Any:
    tensor = getattr(tensor, "_local_tensor", tensor).detach()  # of a DTensor; its sum would be a collective
    return tensor if tensor.numel() <= SMALL else tensor.flatten()[:SMALL]


def _is_sized(loader: Any) -> bool:
    try:
        return len(loader) >= 0
    except TypeError:
        return False
