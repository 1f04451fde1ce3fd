"""The training loop. It yields after each step, so that the caller can log, evaluate, save or stop."""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import pairwise
from typing import Unpack

from msgspec import Struct, field

from paceline.compute.flops import tokens_of
from paceline.compute.phase_events import PhaseEvents
from paceline.data.loader import MicroBatch
from paceline.data.plan import combine_fingerprints, fingerprint
from paceline.protocol.evidence import Phase
from paceline.protocol.status_page import StatusPage
from paceline.rank.guard import HangGuard
from paceline.stepping.totals import StepResult
from paceline.stepping.trained_model import LossScale
from paceline.strategies.base import Strategy
from paceline.tasks.task import Loss
from paceline.train.optimizer import LRSchedule
from paceline.train.step import StepOptions, TaskSteps

PhaseStart = tuple[str, float]
"""(name of the phase, its start in seconds of CLOCK_MONOTONIC)"""


class StepRecord(Struct, frozen=True):
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
        return sum(self.phase_seconds.values())

    def num_tokens_and_samples(self) -> tuple[int, int]:
        """(tokens, samples) of this rank, without padding batches."""
        tokens = samples = 0
        for batch in self.microbatches:
            if batch.work.is_counted:
                tokens, samples = tokens + tokens_of(batch.inputs), samples + batch.work.indices.numel()
        return tokens, samples

    def fingerprint(self) -> int:
        used = [batch.work for batch in self.microbatches if batch.work.is_counted]
        return combine_fingerprints(*(fingerprint(work.indices) for work in used))

    @property
    def data_seconds(self) -> float:
        return self.phase_seconds.get(Phase.DATA.word, 0.0)


class PhaseClock:
    """The seconds of each phase of a step, from the times at which the status page has entered them.

    If `on_device` is given, it has recorded events on the device for each phase, and their times are used instead.
    """

    def __init__(
        self, page: StatusPage, on_device: PhaseEvents | None = None, enter: Callable[[Phase], object] | None = None
    ) -> None:
        self._page, self._on_device, self._enter = page, on_device, enter or page.enter
        self.starts: Sequence[PhaseStart] = ()
        """The start of each phase of the last step. The last entry has no name and is the end of the step."""

    def start(self) -> None:
        """Begin a step, with the wait for its data."""
        self._page.phase_starts = []
        self._enter(Phase.DATA)

    def take(self) -> dict[str, float]:
        """End the step: return the seconds of each phase. What follows, until `start`, counts for no step."""
        self.starts, self._page.phase_starts = [*(self._page.phase_starts or ()), ("", time.monotonic())], None
        spent: dict[str, float] = {}
        for (phase, start), (_, stop) in pairwise(self.starts):
            spent[phase] = spent.get(phase, 0.0) + stop - start
        on_device = self._on_device.take() if self._on_device else {}
        return on_device or spent


def fit(
    replica: Strategy, steps: Iterable[list[MicroBatch]], loss: Loss, schedule: LRSchedule, *, start: int = 0,
    page: StatusPage | None = None, on_device: PhaseEvents | None = None, scale: LossScale | None = None,
    one_each: bool = False, **options: Unpack[StepOptions],
) -> Generator[StepRecord]:  # fmt: skip
    """Train on `steps` and yield a record after each step.

    Args:
        replica: the model with its strategy.
        steps: for each step, the micro-batches of this rank.
        loss: returns one value per sample, or (values, weights).
        schedule: sets the learning rate before each step.
        start: the number of the first step, from 0.
        page: has the phases of this rank. Default: that of the process.
        on_device: device events of the phases; see PhaseClock.
        scale, one_each, options: see TaskSteps, also for the errors.
    """
    replica.model.train()
    page = page or HangGuard.of_process().page
    clock = PhaseClock(page, on_device, options.setdefault("enter", page.enter))
    step = TaskSteps(replica, loss, scale=scale, one_each=one_each, **options)
    clock.start()
    for number, microbatches in enumerate(steps, start):
        lr = schedule.set_lr(replica.optimizer, number)
        result = step.take_step(microbatches)
        yield StepRecord(number + 1, result, lr, microbatches, clock.take(), clock.starts)
        clock.start()  # the time of the caller does not count for the next step
