"""The position of a custom loop in its step, and the allowed calls at this position."""

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from paceline.errors import UsageError
from paceline.sessions.observer import Observer
from paceline.stepping.step import Step
from paceline.stepping.trained_model import LossScale, TrainedModel


class Notes:
    """Prints each note once."""

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self._say, self._printed = say, set[str]()

    def once(self, text: str) -> None:
        """Print a note, unless it was printed before."""
        if text not in self._printed:
            self._printed.add(text)
            self._say(f"NOTE: {text}")


def trains_otherwise(model: nn.Module) -> bool:
    """Whether the model has modules that differ between training and eval mode."""
    return any(isinstance(module, (_BatchNorm, _DropoutNd)) for module in model.modules())


class SessionStep(Step):
    """The step of a session. Outside a step every call is allowed."""

    merged = False
    """whether models have the buffers of all virtual ranks"""
    notes = Notes()
    optimizers: tuple[int, ...] = ()
    """ids of the prepared optimizers"""
    scale: LossScale | None = None
    """of the losses, with precision fp16"""
    saves = False
    """whether the session writes checkpoints"""
    observer: Observer | None = None

    @property
    def is_over(self) -> bool:
        """Whether this is the last micro-batch of the last pass."""
        return self.micro_step is None or self.phases.is_final(self.micro_step)

    @property
    def untouched(self) -> bool:
        """Whether this rank has not yet computed anything of the step that other ranks may need."""
        return self._first is None and (self.micro_step is None or self.micro_step.done == (0, ()))

    @property
    def is_whole(self) -> bool:
        """Whether the current micro-batch is the last one, with the same backwards as the others of the step."""
        micro_step, usual = self.micro_step, self._usual
        if micro_step is None or micro_step.has_failed or not self.is_over:
            return False
        return bool(micro_step.weights) and usual in (None, micro_step.done)

    def may_update(self, part: TrainedModel, optimizer: int) -> bool:
        """Whether `step()` of the optimizer with this number updates the model now."""
        micro_step = self.micro_step
        if micro_step is None:
            return True
        micro_step.stepped.append(optimizer)
        micro_step.has_stepped = True
        self.phases.keep_buffers(micro_step)
        if not (micro_step.is_last and self.phases.counts(micro_step)) or self.is_skipped:
            return False
        if part.has_aside:
            raise UsageError(code="step-before-last-backward")
        self.begin_update()
        return True

    def check_only_loop(self) -> None:
        """Raise UsageError if a training loop begins in the body of a training loop."""
        if self.micro_step is not None:
            raise UsageError(code="two-loops-at-once")

    def check_evaluation(self) -> None:
        """Raise UsageError if a model is evaluated with the buffers of one virtual rank."""
        if not self.merged and self.micro_step is None:
            raise UsageError(code="evaluated-with-buffers-of-one")

    def check_forward(self) -> None:
        """Raise UsageError if not all ranks may call a model whose forward is a collective."""
        if not self.merged and self.micro_step is None:
            raise UsageError(code="sharded-model-outside-loop")

    def check_evaluated(self, samples: int, ranks: int) -> None:
        """Raise UsageError if a rank without samples would not call a model whose forward is a collective."""
        if samples < ranks and any(part.replica.in_lockstep for part in self.parts):
            raise UsageError(code="too-few-samples-to-evaluate", samples=samples, ranks=ranks)
