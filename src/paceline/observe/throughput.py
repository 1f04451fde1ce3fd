"""Samples per second of the global batch, over a window, after a warm-up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WARMUP_STEPS = 5  # allocators, kernel selection and lazy imports make the first steps slow
WINDOW_STEPS = 50


class Throughput:
    """Fed once a step; time that is not training (evaluation) is taken out with `pause`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps = 0
        self._paused = 0.0
        self._marks: deque[tuple[float, int]] = deque(maxlen=WINDOW_STEPS + 1)  # (time, samples so far)
        self._samples = 0
        self._first: tuple[float, int] | None = None

    def step(self, samples: int) -> None:
        """A step on `samples` samples, over all ranks, has just ended."""
        self._steps += 1
        self._samples += samples
        if self._steps >= WARMUP_STEPS:
            mark = (self._clock() - self._paused, self._samples)
            self._first = self._first or mark
            self._marks.append(mark)

    def pause(self, seconds: float) -> None:
        """`seconds` since the last step were not spent on training."""
        self._paused += seconds

    def recent(self) -> float | None:
        """Samples per second over the last 50 steps; None during the warm-up."""
        return self._rate(self._marks[0], self._marks[-1]) if len(self._marks) > 1 else None

    def overall(self) -> float | None:
        """Samples per second since the warm-up; None if the run was no longer than that."""
        return self._rate(self._first, self._marks[-1]) if self._first and len(self._marks) > 1 else None

    @staticmethod
    def _rate(start: tuple[float, int], end: tuple[float, int]) -> float | None:
        seconds = end[0] - start[0]
        return (end[1] - start[1]) / seconds if seconds > 0 else None
