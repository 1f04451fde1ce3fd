"""Events of a session for an observer. `paceline verify` uses it to observe an unchanged loop."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from paceline.checkpoint.state import ResumePoint
from paceline.data.plan import MicroBatchPlan
from paceline.rank.world import World
from paceline.sessions.loader import Loader
from paceline.stepping.micro_step import MicroStep, Reduction
from paceline.stepping.trained_model import ModelInTraining
from paceline.strategies.base import Strategy
from paceline.train.step_record import StepRecord

ApplyStrategy = Callable[..., Strategy]  # a strategy whose options are known


class Observer:
    """Base class: each method is an event, and does nothing. Without an observer an event costs a comparison with None.

    An observed session writes no files and does not print.
    """

    options: Mapping[str, Any] = {}
    """arguments of `session()` that replace those of the loop"""
    max_steps: float = math.inf
    """number of steps after which training ends, while the script continues"""
    models: Sequence[ModelInTraining] = ()
    """the prepared models"""

    def resume_point(self, world: World) -> ResumePoint | None:
        """The session has joined the ranks of `world`. Returns the state to resume from."""

    def wrap_strategy(self, name: str, apply: ApplyStrategy) -> ApplyStrategy:
        """s.prepare was called with a model. The returned function creates its replica."""
        return apply

    def on_register(self, thing: object) -> None:
        """s.register was called with an object."""

    def on_loader(self, loader: Loader, *, per_virtual_rank: bool) -> None:
        """The loop created a loader. `per_virtual_rank`: its batch size is that of each virtual rank."""

    def on_batch(self, inputs: Any, work: MicroBatchPlan | None) -> Any:
        """A loop body begins. In an evaluation `work` is None. Returns the inputs for the loop."""
        return inputs

    def on_batch_end(self) -> None:
        """The body of a training loop has ended. Its random streams are still active."""

    def on_backward(
        self, loss: Tensor, weight: float | Tensor | None, reduction: Reduction, micro_step: MicroStep | None
    ) -> None:
        """s.backward begins."""

    def on_gradients(self, micro_step: MicroStep | None) -> None:
        """s.backward returns. In the last body of a step .grad is the gradient of the global batch's mean."""

    def on_update(self, part: ModelInTraining) -> None:
        """An optimizer updates a model with the current gradients."""

    def on_step(self, record: StepRecord) -> None:
        """A step has ended."""

    def on_numbers(self, named: Mapping[str, float]) -> None:
        """s.log was called with these numbers, or s.mean returns one."""

    def on_print(self, words: Sequence[Any]) -> None:
        """The session or the loop prints on rank 0. Every rank gets this event."""

    def on_end(self) -> None:
        """The session ends without an error."""


_observers: list[Observer] = []


@contextmanager
def use_observer(observer: Observer) -> Generator[None]:
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def current_observer() -> Observer | None:
    return _observers[-1] if _observers else None
