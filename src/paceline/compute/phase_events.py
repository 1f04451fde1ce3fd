"""Times the phases of a step on a device, with events on its stream, because the host only launches the work.

    host     |data|forward|backward|sync ....... |optimizer|        times of launches, and then of one long wait
    device        |--- forward ---|---- backward ----|sync|optimizer|

An event marks the beginning of each phase. It is read in a later phase, when the device has passed it. Nothing waits.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from paceline.protocol.evidence import Phase


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


def phase_events(device: torch.device) -> PhaseEvents | None:
    if device.type == "cpu":
        return None
    recording = torch.cuda.is_current_stream_capturing if device.type == "cuda" else lambda: False
    return PhaseEvents(lambda: torch.Event(device, enable_timing=True), recording)
