"""Reads how each worker of a node gets on, from its box and by the agent's own clock.

A worker's clock is not asked: an age is how long the agent has seen nothing of it move.
"""

from __future__ import annotations

from msgspec.structs import replace

from paceline.contract.boxes import read_counters
from paceline.contract.evidence import Sample
from paceline.contract.windows import JUMP_SECONDS, Windows

SAMPLE_SECONDS, SHORT_SAMPLE_SECONDS = 1.0, 0.25
SHORT_WINDOW_SECONDS = 10.0


class Stillness:
    """When each worker of one generation moved last."""

    def __init__(self) -> None:
        # rank -> its counters, since when they have been so, and when they were read
        self._seen: dict[int, tuple[tuple[int, ...], float, float]] = {}

    def read(self, worker: Sample, box: int, now_seconds: float) -> Sample:
        """`worker` with what its box shows; to be called at least every second or two.

        Args:
            worker: what is known of its process.
            box: the box's descriptor.
            now_seconds: on one monotonic clock.
        """
        counters = read_counters(box)
        moved, since_seconds, read_seconds = self._seen.get(worker.rank, ((), now_seconds, now_seconds))
        if moved != counters.moved or now_seconds - read_seconds > JUMP_SECONDS:
            since_seconds = now_seconds
        self._seen[worker.rank] = counters.moved, since_seconds, now_seconds
        return replace(
            worker,
            step=counters.step,
            phase=counters.phase,
            phase_seconds=counters.phase_seconds,
            still_seconds=now_seconds - since_seconds if worker.runs else 0.0,
            waiting=counters.waiting,
            met=counters.met,
        )


def sample_seconds(windows: Windows) -> float:
    """How often boxes are read."""
    short = windows.seconds is not None and windows.seconds < SHORT_WINDOW_SECONDS
    return SHORT_SAMPLE_SECONDS if short else SAMPLE_SECONDS
