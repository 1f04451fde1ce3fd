"""The position of a custom loop in its data and in its step, and the allowed calls at this position."""

import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from paceline.errors import PacelineError, UsageError
from paceline.nested import tensors
from paceline.sessions.observer import Observer
from paceline.stepping.hooks import graph_nodes
from paceline.stepping.micro_step import MicroStep
from paceline.stepping.step import Step
from paceline.stepping.trained_model import LossScale, ModelInTraining

POSITION_KEYS = ("phase", "epoch", "pass", "passes", "batch")  # names in checkpoints of the fields of LoopPosition
NO_GRADIENT_ERRORS = (AttributeError, TypeError, RuntimeError)  # errors of code that reads None from .grad
CLIP_GRAD_FILE = "torch/nn/utils/clip_grad.py"  # its error for a None gradient does not contain "NoneType"


class NotePrinter:
    def __init__(self, say: Callable[[str], None] = print) -> None:
        self._say, self._printed = say, set[str]()

    def once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            self._say(f"NOTE: {text}")


def is_mode_dependent(model: nn.Module) -> bool:
    return any(isinstance(module, (_BatchNorm, _DropoutNd)) for module in model.modules())


@dataclass
class LoopPosition:
    epochs_call: int = 0  # the call of s.epochs
    epoch: int = 0  # in this call
    loop_in_epoch: int = 0  # the loop over data, in this epoch
    loop_in_run: int = 0  # the loop over data, in the run
    batch: int = 0  # the global batch, in this loop

    def state_dict(self) -> dict[str, int]:
        return dict(zip(POSITION_KEYS, astuple(self), strict=True))

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, batch {self.batch + 1}"


class SessionStep(Step):
    """The step of a session. Outside a step every call is allowed."""

    merged = False  # whether models have the buffers of all virtual ranks
    notes = NotePrinter()
    optimizer_ids: tuple[int, ...] = ()  # of the prepared optimizers
    loss_scale: LossScale | None = None  # with precision fp16
    saves = False  # whether the session writes checkpoints
    left: MicroStep | None = None  # in which the last loop was left, perhaps by an error
    observer: Observer | None = None

    @property
    def is_final_micro_batch(self) -> bool:
        if self.audits is not None and self.audits.is_disputed:  # the step will be repeated
            return False
        if (micro_step := self.micro_step) is None:
            return True
        return micro_step.is_last and (self.has_one_body or self._pass == self._num_passes - 1)

    @property
    def is_after_backward(self) -> bool:
        return self.micro_step is not None and bool(self.micro_step.weights)

    @property
    def is_untouched(self) -> bool:
        """Whether this rank has not yet computed anything of the step that other ranks may need."""
        return self._first is None and (self.micro_step is None or self.micro_step.completed_calls == (0, ()))

    @property
    def is_complete_after_body(self) -> bool:
        """Whether the current micro-batch is the last one, with the same backwards as the others of the step."""
        micro_step, usual = self.micro_step, self._usual
        if micro_step is None or micro_step.has_failed or not self.is_final_micro_batch:
            return False
        return bool(micro_step.weights) and usual in (None, micro_step.completed_calls)

    def begin_update(self, part: ModelInTraining, optimizer: int) -> bool:
        micro_step = self.micro_step
        if micro_step is None:
            return True
        micro_step.stepped_optimizers.append(optimizer)
        micro_step.has_stepped = True
        if not self.has_one_body:
            self._save_or_restore_buffers(micro_step)
            if not micro_step.is_last or micro_step.phase != self._pass:
                return False
        if self._result.skip_cause is not None:
            return False
        if part.aside is not None:
            raise UsageError(code="step-before-last-backward")
        self.enter_optimizer_phase()
        return True

    def _save_or_restore_buffers(self, micro_step: MicroStep) -> None:
        """At the end of a phase, in a step of several bodies: save the buffers in its pass, restore them later."""
        key = (micro_step.work.virtual_rank, micro_step.work.micro_batch, len(micro_step.stepped_optimizers))
        buffers = [buffer for part in self.parts for buffer in part.replica.model.buffers()]
        if micro_step.phase == self._pass:
            self._phase_buffers[key] = [buffer.clone() for buffer in buffers]
        elif micro_step.phase < self._pass:
            with torch.no_grad():
                for buffer, saved in zip(buffers, self._phase_buffers[key], strict=True):
                    buffer.copy_(saved)

    def check_no_nested_loop(self) -> None:
        if self.micro_step is not None:
            raise UsageError(code="two-loops-at-once")

    def check_evaluation(self) -> None:
        if not self.merged and self.micro_step is None:
            raise UsageError(code="evaluated-with-buffers-of-one")

    def check_forward_allowed(self) -> None:
        if not self.merged and self.micro_step is None:
            raise UsageError(code="sharded-model-outside-loop")

    def check_enough_evaluation_samples(self, samples: int, ranks: int) -> None:
        if samples < ranks and any(part.replica.in_lockstep for part in self.parts):
            raise UsageError(code="too-few-samples-to-evaluate", samples=samples, ranks=ranks)

    def foreign_leaves(self) -> list[Tensor]:
        """Leaf tensors of the last loss that are not parameters of the models, nor gathered ones of `fsdp`."""
        ids = {id(p) for part in self.parts for p in part.replica.model.parameters()}
        nodes = () if self._value is None else graph_nodes(self._value.grad_fn)
        leaves: list[Tensor] = [node.variable for node in nodes if hasattr(node, "variable")]
        return [leaf for leaf in leaves if id(leaf) not in ids and not hasattr(leaf, "named_in_model")]

    def make_forward_retry(self, failed: MicroStep, error: BaseException) -> Callable[[int], None] | None:
        """A function that repeats the forward of a failed micro-batch with fewer samples, and a backward.

        It cannot repeat the code of the loop. None: this rank does not know the call of the model, or needs others.
        """
        from paceline.stepping.nonfinite import select_samples
        from paceline.train.memory import has_no_collectives

        replica = self.parts[0].replica
        if len(self.parts) > 1 or not has_no_collectives(replica):
            return None
        batch, samples, module = failed.batch, len(failed.work.indices), replica.module
        arguments, is_released = _release_failed_call(error, module)
        if arguments is None:  # it was not the forward: most loops call the model so
            inputs = batch.inputs if isinstance(batch.inputs, (Mapping, list, tuple)) else [batch.inputs]
            arguments = ((), inputs) if isinstance(inputs, Mapping) else (inputs[:1], {})
        if not is_released or not any(tensor.ndim and len(tensor) == samples for tensor in tensors(arguments)):
            return None
        if self.in_step:
            self.abort_step()

        def compute(size: int) -> None:
            args, kwargs = select_samples(arguments, [*range(size)], samples)
            work = replace(batch.work, is_counted=False, indices=batch.work.indices[:size])
            for _ in self.run_trial(replace(batch, samples=None, work=work)):
                losses = [tensor.sum().float() for tensor in tensors(module(*args, **kwargs)) if tensor.requires_grad]
                self.backward(torch.stack(losses).sum(), reduction="sum")

        return compute

    def explain_gradient_error(self, error: BaseException | None) -> UsageError | None:
        micro_step = self.micro_step
        if not isinstance(error, NO_GRADIENT_ERRORS) or isinstance(error, PacelineError):
            return None
        text, trace = f"{type(error).__name__}: {error}.", error.__traceback__
        if "mixed torch.Tensor and DTensor" in str(error):
            return UsageError(code="sharded-weights-used", error=text).with_traceback(trace)
        is_early = micro_step is not None and not micro_step.is_last and bool(micro_step.weights)
        if not is_early or any(part.has_gradients for part in self.parts):
            return None
        files = [frame.filename for frame in traceback.extract_tb(trace)]
        if "NoneType" not in str(error) and not any(file.endswith(CLIP_GRAD_FILE) for file in files):
            return None
        return UsageError(code="gradient-not-complete", error=text).with_traceback(trace)


def _release_failed_call(error: BaseException, module: Any) -> tuple[Any, bool]:
    """Release the memory of a failed micro-batch.

    Returns the arguments of the call of `module` that has failed, if one has, and whether all graphs are released.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    known = [frame.f_locals for frame in frames]
    calls = (own for own in known if own.get("self") is module and {"args", "kwargs"} <= own.keys())
    arguments, held = next(((call["args"], call["kwargs"]) for call in calls), None), list[Tensor]()
    for value in [value for own in known for value in own.values()]:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        held += [part for part in parts if isinstance(part, Tensor) and part.grad_fn is not None]
    for tensor in held if arguments is None else ():  # its graph has the activations
        with suppress(RuntimeError):  # a view
            tensor.detach_()
    traceback.clear_frames(error.__traceback__)
    for frame in frames:  # until it is read again, the dict of a cleared frame keeps the values
        frame.f_locals  # noqa: B018
    return arguments, arguments is not None or all(tensor.grad_fn is None for tensor in held)
