"""Probes for faults that a rank finds in its script, in every run: not finite, swallowed, stale.

`NonFiniteGradientDetector` finds the rank, the step and the batch that made the gradients of a step NaN or infinite. A
NaN propagates back to the parameters near the input, so one small parameter there is sufficient. The probe checks its
gradient twice: on this rank, before DDP sums over ranks, and as the optimizer gets it. Only applied gradients count:
code that finds the NaN and skips the step, as GradScaler does, is correct. Code that replaces the numbers and steps is
wrong, because the results of the forward pass, for example statistics of a batch norm, are not finite.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from paceline.protocol.evidence import ScriptFault, is_lost_peer_error
from paceline.protocol.marks import write_script_finding
from paceline.protocol.status_page import StatusPage
from paceline.rank.flight_recorder import loaded_c10d_module
from paceline.rank.probes import DeferredReads, ScriptListener, is_not_capturing, leaf_digests
from paceline.rank.probes.steps import USUAL_STEP_WINDOW, StepCounter
from paceline.rank.sites import format_frame, format_user_site, user_frame_of_error

MAX_CHECKED_ELEMENTS = 16384  # elements that are checked: of a smaller parameter, or of the first one
MAX_NAMED_SAMPLES = 8  # samples
ACCELERATE_LOADER_FILE = "/accelerate/data_loader.py"  # the Trainer also uses its loaders
# Lightning's, which fetches one ahead if the number of batches is unknown
LIGHTNING_PREFETCHER = "_PrefetchDataFetcher"
GLOO_TRANSPORT_FILE = "gloo/transport/"  # a source file in the error messages of gloo
MIN_STEPS_PAST_DDP = 3  # consecutive steps without DDP before a report
MOST_SWALLOWED, MOST_CHARS, MOST_NAME = 3, 300, 40
PAIR_EVERY, PAIRS, FEW_ELEMENTS = 8, 2, 256  # the inputs of PAIRS pairs of steps must be equal


class BatchTracker(ScriptListener):
    """Tracks the current batch of the script. A framework may have fetched the next one, to detect the last one."""

    def __init__(self) -> None:
        self._drawn: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()
        self._number: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._epochs: dict[weakref.ref[Any], int] = {}
        self._ahead: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # whether a framework fetches one ahead
        self._next: tuple[int, int, Any] | None = None
        self._last: tuple[int, int, Any] | None = None

    def on_epoch_begin(self, batches: Any) -> None:
        loader = batches.of_loader
        self._epochs[loader] = self._epochs.get(loader, 0) + 1
        self._number[batches] = 0
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame is not None and not self._ahead.get(batches, False):
            prefetches = type(frame.f_locals.get("self")).__name__ == LIGHTNING_PREFETCHER and not _is_sized(loader())
            self._ahead[batches] = prefetches or frame.f_code.co_filename.endswith(ACCELERATE_LOADER_FILE)
            frame = frame.f_back

    def on_indices_drawn(self, batches: Any, indices: Any) -> None:
        self._drawn.setdefault(batches, deque()).append(indices)

    def on_batch_received(self, batches: Any, batch: Any) -> None:
        drawn, number = self._drawn.get(batches), self._number.get(batches, 0) + 1
        self._number[batches] = number
        indices = drawn.popleft() if drawn else []
        batch_position = (number, self._epochs.get(batches.of_loader, 1), indices)
        self._last = self._next if self._ahead.get(batches) and number > 1 else batch_position
        self._next = batch_position

    def on_epoch_end(self, batches: Any) -> None:
        if self._next is not None:
            self._last = self._next

    def current_batch_text(self) -> str:
        """The current batch of the script, as text."""
        if self._last is None:
            return ""
        number, epoch, indices = self._last
        drawn_indices: list[Any] = [*indices] if isinstance(indices, Iterable) else [indices]
        samples = [index for index in drawn_indices if index is not None]  # a stream has no indices
        shown = ", ".join(str(index) for index in samples[:MAX_NAMED_SAMPLES]) + (
            ", ..." if len(samples) > MAX_NAMED_SAMPLES else ""
        )
        return f", batch {number} of epoch {epoch}" + (f", samples {shown}" if samples else "")


class NonFiniteGradientDetector(ScriptListener):
    """Finds optimizer steps with gradients that are NaN or infinite."""

    def __init__(self, page: StatusPage, steps: StepCounter, batches: BatchTracker) -> None:
        self._page, self._steps, self._batches, self._later = page, steps, batches, DeferredReads()
        self._sensors: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # optimizer -> its parameter near the input
        self._hooked: dict[int, weakref.ref[Any]] = {}  # by id, because tensors compare by their elements
        self._own: dict[int, str] = {}  # step -> a value of this rank that was not finite
        self._lost: dict[int, str] = {}  # step -> its last loss, if that was not finite
        self._follows = False  # whether parameters were not finite before the last loss, so that the loss is no cause
        self._called_again = False  # whether a closure has called backward after `on_step_begin` (L-BFGS)
        self._hidden_reported = False
        self._reported = False

    def on_replica_created(self, ddp: Any) -> None:
        named = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
        if named:
            name, sensor = next((pair for pair in named[:8] if pair[1].numel() <= MAX_CHECKED_ELEMENTS), named[0])
            self._hook_sensor(sensor, name)

    def on_backward_begin(self, losses: Any) -> None:
        self._later.deliver_arrived()
        loss = losses if hasattr(losses, "numel") else next(iter(losses), None)
        self._follows, self._called_again = False, True
        if loss is None or loss.numel() != 1 or not is_not_capturing(loss):
            return
        step, batch, site = self._steps.done + 1, self._batches.current_batch_text(), format_user_site()
        at = f" at {site}" if site else ""

        def look(values: list[float]) -> None:
            self._lost.pop(step, None)
            self._follows = any(values[1:])
            if not math.isfinite(values[0]) and not self._follows:
                self._lost[step] = f"a loss of {values[0]}{at}{batch}"
                self._own.setdefault(step, f"its loss was {values[0]}{at}{batch}")

        torch = sys.modules["torch"]
        sensors: list[Any] = [ref() for ref in self._hooked.values()]
        same_device = (p for p in sensors if type(p) is torch.nn.Parameter and p.device == loss.device)
        not_finite = [_is_not_finite(p).double() for p in same_device]
        self._later.read(torch.cat([loss.detach().reshape(1).double(), *not_finite]), look)

    def on_step_begin(self, optimizer: Any) -> None:
        self._called_again = False
        if self._reported or getattr(optimizer, "found_inf", None) is not None:  # GradScaler has checked already
            return
        sensor = self._sensors[optimizer] if optimizer in self._sensors else self._choose_sensor(optimizer)
        if sensor is None or sensor.grad is None or sensor.grad.is_sparse or not is_not_capturing(sensor.grad):
            return
        step = self._steps.done + 1
        for texts in (self._own, self._lost):
            texts.pop(step - 5, None)  # older ones are not read

        def look(values: list[bool]) -> None:
            if values[0]:
                self._report(step)
            elif (lost := self._lost.pop(step, "")) and not self._hidden_reported:
                self._hidden_reported = True
                write_script_finding(self._page, ScriptFault("swallowed", step, lost))

        self._later.read(_is_not_finite(sensor.grad), look)

    def on_step_end(self, optimizer: Any) -> None:
        """Check the new parameters after further backwards: a line search may discard a point that is not finite."""
        sensor, step = self._sensors.get(optimizer), self._steps.done + 1
        if self._called_again and sensor is not None and is_not_capturing(sensor):
            self._later.read(_is_not_finite(sensor), lambda values: self._report(step) if values[0] else None)

    def _report(self, step: int) -> None:
        if not self._reported:
            self._reported, local = True, self._own.get(step)
            write_script_finding(self._page, ScriptFault("not finite", step, local or "", own=local is not None))

    def _choose_sensor(self, optimizer: Any) -> Any:
        """A small parameter among the first ones, which are near the input."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        sensor = next((p for p in parameters if (ref := self._hooked.get(id(p))) and ref() is p), None)
        if parameters and sensor is None:
            sensor = next((p for p in parameters[:8] if p.numel() <= MAX_CHECKED_ELEMENTS), parameters[0])
            self._hook_sensor(sensor, "a parameter")
        self._sensors[optimizer] = sensor
        return sensor

    def _hook_sensor(self, sensor: Any, name: str) -> None:
        def seen(gradient: Any) -> None:
            if gradient.is_sparse or not is_not_capturing(gradient):
                return
            step, batch = self._steps.done + 1, self._batches.current_batch_text

            def look(values: list[bool]) -> None:
                if values[0] and not self._follows:
                    self._own.setdefault(step, f"its local gradient of {name} was not finite{batch()}")

            self._later.read(_is_not_finite(gradient), look)

        self._hooked[id(sensor)] = weakref.ref(sensor)
        sensor.register_hook(seen)


def _is_not_finite(tensor: Any) -> Any:
    tensor = getattr(tensor, "_local_tensor", tensor).detach()  # the sum of a DTensor would be a collective
    checked = tensor if tensor.numel() <= MAX_CHECKED_ELEMENTS else tensor.flatten()[:MAX_CHECKED_ELEMENTS]
    return checked.sum().isfinite().logical_not().reshape(1)


def _is_sized(loader: Any) -> bool:
    try:
        return len(loader) >= 0
    except TypeError:
        return False


class SwallowedExceptionDetector(ScriptListener):
    """Finds exceptions after which the script takes another step, and exceptions that end a thread."""

    def __init__(self, page: StatusPage, steps: StepCounter) -> None:
        self._page, self._steps = page, steps
        self._raised: dict[str, tuple[str, Callable[[], Any] | None]] = {}
        """Since the last step: error and line -> text, and, if a collective failed, a reference to its world."""
        self._reported: set[str] = set()
        self._collective_reported = False

    def on_exception(self, where: str, error: BaseException) -> None:
        if not isinstance(error, Exception):
            return
        world_ref = _default_group_ref() if is_collective_failure(error) else None
        if where != "collective" or world_ref is not None:  # else it did not begin: not supported by the backend
            line, name = _user_line_of(error), type(error).__name__
            self._raised[f"{name} {line}"] = f"{name} in its {where}, at {line}: {str(error)[:MOST_CHARS]}", world_ref

    def on_thread_failed(self, name: str, error: BaseException) -> None:
        key, message = f"{type(error).__name__} at {_user_line_of(error)}", str(error)[:MOST_CHARS]
        if key not in self._reported and len(self._reported) < MOST_SWALLOWED:
            self._reported.add(key)
            predicate = f"its thread {name[:MOST_NAME]} ended with {key}: {message}"
            write_script_finding(self._page, ScriptFault("thread", self._steps.done, predicate))

    def on_step_end(self, optimizer: Any) -> None:
        self._report(self._steps.done)

    def on_script_succeeded(self) -> None:
        self._report(self._steps.done, last=True)

    def _report(self, step: int, *, last: bool = False) -> None:
        exceptions, self._raised = self._raised, {}
        for key, (predicate, world_ref) in exceptions.items():
            if world_ref is not None:
                world = _default_group_ref()()
                # a script that has made a new default group since has handled the error
                if not self._collective_reported and (world is None or world is world_ref()):
                    self._collective_reported = True
                    write_script_finding(self._page, ScriptFault("collective", step, predicate, last=last))
            elif key not in self._reported and len(self._reported) < MOST_SWALLOWED:
                self._reported.add(key)
                write_script_finding(self._page, ScriptFault("swallowed", step, predicate, last=last))


class StepAnomalyDetector(ScriptListener):
    """Finds a step without new gradients, a skipped step or batch, a repeated batch, and an optimizer that leaves DDP.

    Each of these may be intended, so the agent reports a finding only if other ranks do not have it.
    """

    def __init__(self, page: StatusPage, steps: StepCounter) -> None:
        self._page, self._steps, self._joint = page, steps, steps.joint
        self._backwards = self._before_step = 0  # so far, and until the last step of any optimizer
        self._past = 0  # consecutive steps without DDP
        self._stepped: WeakKeyDictionary[Any, tuple[int, int, int]] = WeakKeyDictionary()
        """By optimizer: backwards until its last step, backwards of that step, and number of equal steps in a row."""
        self._batches: weakref.ref[Any] | None = None  # the iterator that returned the last batch
        self._given = 0  # batches from it since any optimizer's last step
        self._usual_given, self._times_given = 0, 0  # the same at the last step, and number of equal steps in a row
        self._begun: WeakSet[Any] = WeakSet()  # iterators before their first step
        self._most_at_first = 0  # batches before the first step of a pass, which are more with read-ahead
        self._inputs: WeakKeyDictionary[Any, tuple[int, list[str], int]] = WeakKeyDictionary()
        self._reported: set[str] = set()

    def on_backward_begin(self, losses: Any) -> None:
        self._backwards += 1

    def on_epoch_begin(self, batches: Any) -> None:
        self._begun.add(batches)
        self._batches = None  # with persistent workers, the next epoch has the same iterator

    def on_batch_received(self, batches: Any, batch: Any) -> None:
        if self._batches is None or self._batches() is not batches:
            self._batches, self._given = weakref.ref(batches), 0
        self._given += 1

    def on_step_begin(self, optimizer: Any) -> None:
        if self._is_private(optimizer):
            self._backwards = self._before_step
            return
        self._before_step = self._backwards
        if self._given:
            self._check_batches_per_step()
        backwards, usual, times = self._stepped.get(optimizer, (-1, 0, 0))
        new = self._backwards_of(optimizer) - backwards
        if new == 0 < usual and times >= USUAL_STEP_WINDOW:
            self._report("made a step without backward(), for the first time: a skipped batch or a swallowed error")
        elif new > usual and times >= USUAL_STEP_WINDOW:
            self._report("skipped a step after backward(), for the first time: a swallowed error or a skipped batch")
        self._stepped[optimizer] = self._backwards_of(optimizer), new, times + 1 if new == usual else 0

    def _check_batches_per_step(self) -> None:
        num_batches, self._given = self._given, 0
        batches = self._batches and self._batches()
        usual_batches, is_usual = self._usual_given, self._times_given >= USUAL_STEP_WINDOW
        if batches in self._begun:
            self._begun.discard(batches)
            usual_batches = self._most_at_first or num_batches
            self._most_at_first = max(num_batches, usual_batches)
        else:
            self._times_given = self._times_given + 1 if num_batches == usual_batches else 0
            self._usual_given = num_batches
        if num_batches > usual_batches and is_usual:
            self._report("skipped a batch, for the first time: the script may have swallowed an error")

    def on_step_end(self, optimizer: Any) -> None:
        """Count further calls of the closure (L-BFGS) as part of this step."""
        if optimizer in self._stepped:
            self._stepped[optimizer] = self._backwards_of(optimizer), *self._stepped[optimizer][1:]

    def _backwards_of(self, optimizer: Any) -> int:
        """The number of backwards so far that may have given it gradients; with a replica, only those through DDP."""
        return self._backwards if self._joint.history_of(optimizer).replica is None else self._joint.through

    def _is_private(self, optimizer: Any) -> bool:
        past = self._joint.history_of(optimizer).bypasses_ddp
        if past or not self._joint.is_last_step_local(optimizer):
            self._past = self._past + 1 if past else 0
        if self._past == MIN_STEPS_PAST_DDP and past:
            write_script_finding(self._page, ScriptFault("left", self._steps.done, "trains on past DDP"))
        return self._joint.is_last_step_local(optimizer)

    def on_forward_begin(self, ddp: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        step = self._steps.done
        if step % PAIR_EVERY > 1 or not ddp.training or not sys.modules["torch"].is_grad_enabled():
            return
        last_step, last_digests, num_equal = self._inputs.get(ddp, (-1, [], 0))
        if last_step == step or any(getattr(value, "is_cuda", False) for value in (*inputs, *named.values())):
            return  # only the first micro-batch counts, and the host must not wait for a device
        digests = leaf_digests([inputs, named], most=FEW_ELEMENTS, constants=True)  # also padding with zeros
        if step % PAIR_EVERY == 1 and last_step == step - 1:
            num_equal = num_equal + 1 if digests == last_digests and any(digests) else 0
            if num_equal == PAIRS:
                since = step - PAIR_EVERY * (PAIRS - 1)
                self._report(f"trains on the same batch repeatedly, from about step {since}")
        self._inputs[ddp] = step, digests, num_equal

    def _report(self, predicate: str) -> None:
        kind = predicate.partition(",")[0]
        if kind not in self._reported:
            self._reported.add(kind)
            write_script_finding(self._page, ScriptFault("stale", self._steps.done + 1, predicate))


def is_collective_failure(error: BaseException) -> bool:
    """Whether an error shows that a collective began and failed: a lost peer, a timeout, a wrong size."""
    names = {base.__name__ for base in type(error).__mro__}
    return (
        is_lost_peer_error(error)
        or "DistBackendError" in names
        or ("RuntimeError" in names and GLOO_TRANSPORT_FILE in str(error))
    )


def _default_group_ref() -> Callable[[], Any]:
    module: Any = loaded_c10d_module()
    world = None if module is None else module._world.default_pg
    return (lambda: None) if world is None else weakref.ref(world)


def _user_line_of(error: BaseException) -> str:
    frame = user_frame_of_error(error)
    return "an unknown line" if frame is None else format_frame(frame)
