"""How does each worker of a node get on? From its box, by the agent's own clock; what travels to the head each second.

A worker's clock is not asked: an age is how long the agent has seen nothing of it move.
"""

from __future__ import annotations

import msgspec

from paceline.contract.box import look
from paceline.contract.evidence import Phase
from paceline.contract.windows import Windows
from paceline.guard.pace import RankPace

SAMPLE_SECONDS, SHORT_SAMPLE_SECONDS = 1.0, 0.25
SHORT_WINDOW_SECONDS = 10.0
JUMP_SECONDS = 5.0  # an agent that has not looked for so long was suspended, and its workers perhaps with it


class Pulse(msgspec.Struct, frozen=True):
    """One worker that runs, at one moment."""

    rank: int
    still_seconds: float  # since anything of it has moved
    phase: Phase
    step: int
    waiting: bool  # for other ranks
    met: bool  # it has called a collective
    phase_seconds: tuple[float, ...]  # spent in each phase, up to its last change

    @property
    def pace(self) -> RankPace:
        """What the window is judged by."""
        stepped = None if self.phase is Phase.USER else self.phase_seconds[Phase.OPTIMIZER] > 0
        return RankPace(self.rank, self.still_seconds, self.phase, self.step, self.waiting, stepped)


class Stillness:
    """When each worker of one generation has moved last."""

    def __init__(self) -> None:
        self._moved: dict[int, tuple[tuple[int, ...], float]] = {}  # rank -> its counters, and since when they are so
        self._looked_seconds: float | None = None

    def see(self, boxes: dict[int, int], now_seconds: float) -> list[Pulse]:
        """Look at these boxes (rank -> descriptor); at least every second or two."""
        if self._looked_seconds is not None and now_seconds - self._looked_seconds > JUMP_SECONDS:
            self._moved = {rank: (moved, now_seconds) for rank, (moved, _) in self._moved.items()}
        self._looked_seconds = now_seconds
        return [self._see(rank, box, now_seconds) for rank, box in boxes.items()]

    def _see(self, rank: int, box: int, now_seconds: float) -> Pulse:
        seen = look(box)
        met = seen.ops > 0 or seen.moved[-1] > 0
        moved, since_seconds = self._moved.get(rank, ((), 0.0))
        if moved != seen.moved:
            since_seconds = now_seconds
            self._moved[rank] = (seen.moved, since_seconds)
        still_seconds = now_seconds - since_seconds
        return Pulse(rank, still_seconds, seen.phase, seen.step, seen.waiting, met, seen.phase_seconds)


def sample_seconds(windows: Windows) -> float:
    """How often boxes are looked at."""
    short = windows.seconds is not None and windows.seconds < SHORT_WINDOW_SECONDS
    return SHORT_SAMPLE_SECONDS if short else SAMPLE_SECONDS
