"""The record of a step, and the times of its phases.

On a device, events on its stream measure the phases, because the host only launches the work:

    host     |data|forward|backward|sync ....... |optimizer|        times of launches, and then of one long wait
    device        |--- forward ---|---- backward ----|sync|optimizer|

An event marks the beginning of each phase. It is read in a later phase, when the device has passed it. Nothing waits.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from msgspec import Struct, field

from paceline.compute.flops import count_tokens
from paceline.data.loader import MicroBatch
from paceline.data.plan import combine_fingerprints, fingerprint_indices
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
                tokens, samples = tokens + count_tokens(batch.inputs), samples + batch.work.indices.numel()
        return tokens, samples

    def fingerprint(self) -> int:
        used = [batch.work for batch in self.microbatches if batch.work.is_counted]
        return combine_fingerprints(*(fingerprint_indices(work.indices) for work in used))

    @property
    def data_seconds(self) -> float:
        return self.phase_seconds.get(Phase.DATA.word, 0.0)


class PhaseEvents:
    """The phase times of a rank. Call it at the beginning of each phase; `take` returns the times."""

    def __init__(self, event: Callable[[], Any], recording: Callable[[], bool]) -> None:
        """`event` creates a torch.Event with timing. While `recording()` a CUDA graph, no event is recorded."""
        self._event, self._recording = event, recording
        self._marks: deque[tuple[Phase, Any]] = deque()
        self._free: list[Any] = []  # to be reused: creating an event takes longer than recording it
        self._spent: dict[str, float] = {}

    def __call__(self, phase: Phase) -> list[tuple[Phase, int]]:
        """Begin `phase`. Returns (phase, nanoseconds) of the phases that have ended since the last call."""
        if not self._recording():
            event = self._free.pop() if self._free else self._event()
            event.record()
            self._marks.append((phase, event))
        passed: list[tuple[Phase, int]] = []
        while len(self._marks) > 1 and self._marks[1][1].query():
            done, began = self._marks.popleft()
            milliseconds = began.elapsed_time(self._marks[0][1])
            self._free.append(began)
            passed.append((done, round(milliseconds * 1e6)))
            self._spent[done.word] = self._spent.get(done.word, 0.0) + milliseconds / 1e3
        return passed

    def take(self) -> dict[str, float]:
        """Seconds by phase that have ended since the last take: roughly those of the previous step."""
        spent, self._spent = self._spent, {}
        return spent


def make_phase_events(device: torch.device) -> PhaseEvents | None:
    if device.type == "cpu":
        return None
    recording = torch.cuda.is_current_stream_capturing if device.type == "cuda" else lambda: False
    return PhaseEvents(lambda: torch.Event(device, enable_timing=True), recording)


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
