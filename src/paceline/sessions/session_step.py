"""The position of a custom loop in its step, and the calls that are allowed there."""

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from paceline.errors import UsageError
from paceline.sessions.observer import Observer
from paceline.stepping.step import Step
from paceline.stepping.trained_model import TrainedModel


class Notes:
    """Prints each note once."""

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self._say, self._said = say, set[str]()

    def once(self, words: str) -> None:
        """Print a note, unless it was printed before."""
        if words not in self._said:
            self._said.add(words)
            self._say(f"NOTE: {words}")


def trains_otherwise(model: nn.Module) -> bool:
    """Whether the training mode of a model differs from its eval mode, according to its modules."""
    return any(isinstance(module, (_BatchNorm, _DropoutNd)) for module in model.modules())


class SessionStep(Step):
    """The step of a session. Outside a step every call is allowed."""

    merged = False
    """whether models have the buffers of all virtual ranks"""
    notes = Notes()
    optimizers: tuple[int, ...] = ()
    """the ids of the prepared ones"""
    saves = False
    """whether the session writes checkpoints"""
    observer: Observer | None = None

    @property
    def is_over(self) -> bool:
        """Whether this is the last micro-batch of the last pass."""
        return self.micro_step is None or self.phases.is_last(self.micro_step)

    @property
    def untouched(self) -> bool:
        """Whether this rank has computed nothing of the step on which another rank may depend."""
        return self._first is None and (self.micro_step is None or self.micro_step.done == (0, ()))

    @property
    def is_whole(self) -> bool:
        """Whether the current micro-batch is the last one, and has done the same as the others of the step."""
        micro_step, usual = self.micro_step, self._usual
        if micro_step is None or micro_step.has_failed or not self.is_over:
            return False
        return bool(micro_step.weights) and usual in (None, micro_step.done)

    def may_update(self, part: TrainedModel, optimizer: int) -> bool:
        """Whether `step()` of the optimizer with this number updates now."""
        micro_step = self.micro_step
        if micro_step is None:
            return True
        micro_step.stepped.append(optimizer)
        micro_step.has_stepped = True
        self.phases.keep_buffers(micro_step)
        if not (micro_step.is_last and self.phases.counts(micro_step)) or self.is_left_out:
            return False
        if part.has_aside:
            raise UsageError(code="step-before-last-backward")
        self.begin_update()
        return True

    def check_only_loop(self) -> None:
        """Raise UsageError if a training loop begins in the body of another."""
        if self.micro_step is not None:
            raise UsageError(code="two-loops-at-once")

    def check_evaluation(self) -> None:
        """Raise UsageError where a model is evaluated with buffers of one virtual rank."""
        if not self.merged and self.micro_step is None:
            raise UsageError(code="evaluated-with-buffers-of-one")

    def check_forward(self) -> None:
        """Raise UsageError where not every rank may call a model that all ranks must call together."""
        if not self.merged and self.micro_step is None:
            raise UsageError(code="sharded-model-outside-loop")

    def check_evaluated(self, samples: int, ranks: int) -> None:
        """Raise UsageError where some rank has no share of a batch, and so would not call such a model."""
        if samples < ranks and any(part.replica.in_lockstep for part in self.parts):
            raise UsageError(code="too-few-samples-to-evaluate", samples=samples, ranks=ranks)
