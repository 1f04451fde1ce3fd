"""The record of a step, and the times of its phases."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from msgspec import Struct, field

from paceline.compute.flops import tokens_of
from paceline.compute.phase_events import PhaseEvents
from paceline.data.loader import MicroBatch
from paceline.data.plan import combine_fingerprints, fingerprint
from paceline.protocol.evidence import Phase
from paceline.protocol.status_page import StatusPage
from paceline.stepping.totals import StepResult

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
