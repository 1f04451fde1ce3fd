"""What a session tells its observer. `paceline verify` observes a loop in this way, and the loop runs unchanged."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from paceline.data.plan import Work
from paceline.sessions.loader import Loader
from paceline.stepping.bodies import Body, Reduction
from paceline.stepping.trainee import Trainee
from paceline.strategies.base import Replica
from paceline.train.fit import StepRecord

Apply = Callable[..., Replica]  # a strategy whose options are known


class Observer:
    """Each method is an event, and does nothing here. Without an observer an event is one comparison with None.

    An observed session writes no files, and prints nothing by itself.
    """

    options: Mapping[str, Any] = {}
    """arguments of `session()` that replace those of the loop"""
    max_steps: float = math.inf
    """training ends after so many steps; the script continues"""
    parts: Sequence[Trainee] = ()
    """the models that were prepared so far"""

    def wrap_strategy(self, name: str, apply: Apply) -> Apply:
        """A model was given to s.prepare. What is returned makes its replica."""
        return apply

    def on_register(self, thing: object) -> None:
        """An object was given to s.register."""

    def on_loader(self, loader: Loader, *, per_virtual_rank: bool) -> None:
        """A loader was made. `per_virtual_rank`: its batch size is that of each virtual rank."""

    def on_batch(self, inputs: Any, work: Work | None) -> Any:
        """A body begins, on a micro-batch, or on a batch of an evaluation (no `work`). Returns what the loop gets."""
        return inputs

    def on_batch_end(self) -> None:
        """The body of a training loop has ended. Its random streams are still the current ones."""

    def on_backward(self, loss: Tensor, weight: float | Tensor | None, reduction: Reduction, body: Body | None) -> None:
        """s.backward was called."""

    def on_gradients(self, body: Body | None) -> None:
        """s.backward returns. In the step's last body .grad is the gradient of the global batch's mean."""

    def on_update(self, part: Trainee) -> None:
        """An optimizer updates a model now, with the gradients as they are."""

    def on_step(self, record: StepRecord) -> None:
        """A step has ended."""

    def on_numbers(self, named: Mapping[str, float]) -> None:
        """s.log was given numbers, or s.mean returns one."""

    def on_print(self, words: Sequence[Any]) -> None:
        """The session or the loop prints on rank 0. Every rank is told."""

    def on_end(self) -> None:
        """The session ends without an error."""


_observers: list[Observer] = []


@contextmanager
def observed_by(observer: Observer) -> Generator[None]:
    """Sessions that begin inside have this observer."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def current_observer() -> Observer | None:
    """That of a session that begins now."""
    return _observers[-1] if _observers else None
