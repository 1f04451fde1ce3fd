"""The loop over steps. It yields after each one, so that its caller can log, evaluate, save or stop."""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Unpack

from paceline.compute.flops import tokens_of
from paceline.compute.phase_events import PhaseEvents
from paceline.data.loader import MicroBatch
from paceline.protocol.evidence import Phase
from paceline.stepping.totals import StepResult
from paceline.stepping.trained_model import LossScale
from paceline.strategies.base import Strategy
from paceline.tasks.task import Loss
from paceline.train.optimizer import Rates
from paceline.train.step import StepOptions, TaskSteps, ignore

Border = tuple[str, float]
"""A phase's word, and when it began: seconds of CLOCK_MONOTONIC."""


@dataclass(frozen=True)
class StepRecord:
    """One step as the caller of `fit` sees it. `step` counts from 1 over the whole run."""

    step: int
    result: StepResult
    lr: float
    microbatches: Sequence[MicroBatch]
    phase_seconds: dict[str, float] = field(default_factory=dict[str, float])
    """by the phase's word; together the seconds of the step"""

    borders: Sequence[Border] = ()
    """when each phase began, on this host; the last one is the step's end"""

    @property
    def seconds(self) -> float:
        """Of the whole step, data included."""
        return sum(self.phase_seconds.values())

    @cached_property
    def consumed(self) -> tuple[int, int]:
        """Tokens and samples of this rank, without dummy batches."""
        tokens = samples = 0
        for batch in self.microbatches:
            if batch.work.counted:
                tokens, samples = tokens + tokens_of(batch.inputs), samples + batch.work.indices.numel()
        return tokens, samples

    @property
    def data_seconds(self) -> float:
        """Spent waiting for its data."""
        return self.phase_seconds.get(Phase.DATA.word, 0.0)


class PhaseClock:
    """Passes each phase on to `enter`, and adds up the seconds of each since the last `take`: two readings a phase.

    Where `enter` tells a device's events of it, their times count.
    """

    def __init__(
        self,
        enter: Callable[[Phase], object],
        clock: Callable[[], float] = time.perf_counter,
        on_device: PhaseEvents | None = None,
    ) -> None:
        self._enter, self._clock, self._on_device = enter, clock, on_device
        self._spent: dict[str, float] = {}
        self._phase: Phase | None = None
        self._since = 0.0
        self._borders: list[Border] = []
        self.borders: Sequence[Border] = ()
        """of the step that was taken last: when each phase began, and with an empty word when the last one ended"""

    def __call__(self, phase: Phase) -> None:
        """Begin `phase`, and end the one before."""
        now, before = self._clock(), self._phase
        if before is not None:
            self._spent[before.word] = self._spent.get(before.word, 0.0) + now - self._since
        self._phase, self._since = phase, now
        self._borders.append((phase.word, now))
        self._enter(phase)

    def take(self) -> dict[str, float]:
        """Seconds by the phase's word since the last take; time counts again when the next phase begins."""
        now, before = self._clock(), self._phase
        if before is not None:
            self._spent[before.word] = self._spent.get(before.word, 0.0) + now - self._since
        self._phase, self._since = None, now
        self.borders, self._borders = [*self._borders, ("", self._since)], []
        spent, self._spent = self._spent, {}
        on_device = self._on_device.take() if self._on_device else {}
        return on_device or spent


def fit(
    replica: Strategy,
    steps: Iterable[list[MicroBatch]],
    loss: Loss,
    schedule: Rates,
    *,
    start: int = 0,
    on_device: PhaseEvents | None = None,
    scale: LossScale | None = None,
    one_each: bool = False,
    **options: Unpack[StepOptions],
) -> Generator[StepRecord]:
    """Train on `steps`, each the micro-batches of this rank, beginning with step number `start` (0-based).

    `scale`, `one_each`, `options` and errors are those of TaskSteps. Where `enter` tells `on_device` of phases, its
    times count.
    """
    replica.model.train()
    clock = PhaseClock(options.get("enter", ignore), on_device=on_device)
    step = TaskSteps(replica, loss, scale=scale, one_each=one_each, **{**options, "enter": clock})
    clock(Phase.DATA)
    for number, microbatches in enumerate(steps, start):
        lr = schedule.set(replica.optimizer, number)
        result = step.take(microbatches)
        yield StepRecord(number + 1, result, lr, microbatches, clock.take(), clock.borders)
        clock(Phase.DATA)  # what the caller did meanwhile is no part of the next step
