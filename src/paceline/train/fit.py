"""The training loop. It yields after each step, so that the caller can log, evaluate, save or stop."""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Unpack

from msgspec import Struct, field

from paceline.compute.flops import tokens_of
from paceline.compute.phase_events import PhaseEvents
from paceline.data.loader import MicroBatch
from paceline.data.plan import combine_fingerprints, fingerprint
from paceline.protocol.evidence import Phase
from paceline.stepping.totals import StepResult
from paceline.stepping.trained_model import LossScale
from paceline.strategies.base import Strategy
from paceline.tasks.task import Loss
from paceline.train.optimizer import LRSchedule
from paceline.train.step import StepOptions, TaskSteps, ignore_phase

PhaseStart = tuple[str, float]
"""(name of the phase, its start in seconds of CLOCK_MONOTONIC)"""


class StepRecord(Struct, frozen=True, dict=True):
    """One step of `fit`. `step` counts from 1 over the whole run."""

    step: int
    result: StepResult
    lr: float
    microbatches: Sequence[MicroBatch]
    phase_seconds: dict[str, float] = field(default_factory=dict[str, float])
    """The seconds of each phase, by name. Their sum is the time of the step."""
    phase_starts: Sequence[PhaseStart] = ()
    """The start of each phase on this node. The last entry is the end of the step."""

    @property
    def seconds(self) -> float:
        """The time of the step, including the wait for its data."""
        return sum(self.phase_seconds.values())

    @cached_property
    def num_tokens_and_samples(self) -> tuple[int, int]:
        """(tokens, samples) of this rank, without padding batches."""
        tokens = samples = 0
        for batch in self.microbatches:
            if batch.work.is_counted:
                tokens, samples = tokens + tokens_of(batch.inputs), samples + batch.work.indices.numel()
        return tokens, samples

    @cached_property
    def fingerprint(self) -> int:
        """The fingerprint of the samples that this rank used, without padding batches."""
        used = [batch.work for batch in self.microbatches if batch.work.is_counted]
        return combine_fingerprints(*(fingerprint(work.indices) for work in used))

    @property
    def data_seconds(self) -> float:
        """The time spent waiting for data."""
        return self.phase_seconds.get(Phase.DATA.word, 0.0)


class PhaseClock:
    """Passes each phase to `enter`, and adds up the seconds of each phase since the last `take`.

    If `on_device` is given, it has recorded events on the device for each phase, and their times are used instead.
    """

    def __init__(
        self, enter: Callable[[Phase], object], clock: Callable[[], float] = time.perf_counter,
        on_device: PhaseEvents | None = None,
    ) -> None:  # fmt: skip
        self._enter, self._clock, self._on_device = enter, clock, on_device
        self._borders: list[PhaseStart] = []
        self.borders: Sequence[PhaseStart] = ()
        """The start of each phase of the last step. The last entry has no name and is the end of the step."""

    def __call__(self, phase: Phase) -> None:
        """End the current phase and begin `phase`."""
        self._borders.append((phase.word, self._clock()))
        self._enter(phase)

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call. The clock stops until the next phase begins."""
        self.borders, self._borders = [*self._borders, ("", self._clock())], []
        spent: dict[str, float] = {}
        for (phase, start), (_, stop) in pairwise(self.borders):
            spent[phase] = spent.get(phase, 0.0) + stop - start
        on_device = self._on_device.take() if self._on_device else {}
        return on_device or spent


def fit(
    replica: Strategy, steps: Iterable[list[MicroBatch]], loss: Loss, schedule: LRSchedule, *, start: int = 0,
    on_device: PhaseEvents | None = None, scale: LossScale | None = None, one_each: bool = False,
    **options: Unpack[StepOptions],
) -> Generator[StepRecord]:  # fmt: skip
    """Train on `steps` and yield a record after each step.

    Args:
        replica: the model with its strategy.
        steps: for each step, the micro-batches of this rank.
        loss: returns one value per sample, or (values, weights).
        schedule: sets the learning rate before each step.
        start: the number of the first step, from 0.
        on_device: device events of the phases; see PhaseClock.
        scale, one_each, options: see TaskSteps, also for the errors.
    """
    replica.model.train()
    clock = PhaseClock(options.get("enter", ignore_phase), on_device=on_device)
    step = TaskSteps(replica, loss, scale=scale, one_each=one_each, **{**options, "enter": clock})
    clock(Phase.DATA)
    for number, microbatches in enumerate(steps, start):
        lr = schedule.set_lr(replica.optimizer, number)
        result = step.take_step(microbatches)
        yield StepRecord(number + 1, result, lr, microbatches, clock.take(), clock.borders)
        clock(Phase.DATA)  # the time of the caller does not count for the next step
