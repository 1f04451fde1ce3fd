"""How long each phase takes on a device: by events on its stream, since the host only launches the work.

    host     |data|forward|backward|sync ....... |optimizer|        times of launches, and then of one long wait
    device        |--- forward ---|---- backward ----|sync|optimizer|

An event marks each border. It is read when the device has passed it, in one of the next phases: nothing waits for it.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from paceline.protocol.evidence import Phase


class PhaseEvents:
    """The times of one rank. Call it when a phase begins; it keeps the times of past phases for `take`."""

    def __init__(self, event: Callable[[], Any], recording: Callable[[], bool]) -> None:
        """`event` makes a torch.Event with timing, or what acts as one; while `recording` a graph, none is marked."""
        self._event, self._recording = event, recording
        self._marks: deque[tuple[Phase, Any]] = deque()
        self._free: list[Any] = []  # events that were read: to make one takes the driver longer than to record it
        self._spent: dict[str, float] = {}

    def __call__(self, phase: Phase) -> list[tuple[Phase, int]]:
        """`phase` begins. Returns the phases that have passed since the last call, and their nanoseconds."""
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
        """Seconds by the phase's word that have passed since the last take: about those of the step before."""
        spent, self._spent = self._spent, {}
        return spent


def phase_events(device: torch.device) -> PhaseEvents | None:
    """For a device that runs behind the host; None for the CPU."""
    if device.type == "cpu":
        return None
    recording = torch.cuda.is_current_stream_capturing if device.type == "cuda" else lambda: False
    return PhaseEvents(lambda: torch.Event(device, enable_timing=True), recording)
