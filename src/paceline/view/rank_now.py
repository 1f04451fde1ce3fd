"""A rank as it is shown while it runs, made from what was seen of it at the last looks."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.guard.detectors import OWN
from paceline.observe.events import Step
from paceline.observe.machine import GpuUse, RankUse
from paceline.protocol.evidence import LiveRank, Phase

HISTORY = 120
RECENT = 10  # looks over which shares are taken


@dataclass(frozen=True)
class RankNow:
    """A rank as it is shown."""

    rank: int
    host: str = ""
    phase: str = ""  # empty: nobody says
    ended: str = ""
    step: int = 0
    work_seconds: tuple[float, ...] = ()  # of its own work in a step, at the last looks
    waits: float | None = None  # the part of its time that it waits for others
    still_seconds: float = 0.0
    use: RankUse | None = None
    gpu: GpuUse | None = None
    slowest: bool = False


class History:
    """What was seen of one rank."""

    def __init__(self, rank: int) -> None:
        self.host, self.node = "", 0
        self._now = RankNow(rank)
        self._looks: deque[tuple[int, tuple[float, ...], bool]] = deque(maxlen=RECENT + 1)
        self._work: deque[float] = deque(maxlen=HISTORY)
        self._last: Step | None = None

    def see_live(self, one: LiveRank) -> None:
        """Its agent has said how it is."""
        ended = "lost" if one.lost else "" if one.code is None else "done" if one.code == 0 else f"ended: {one.code}"
        # restarted, or gone back; or what it has written itself was all that was known
        if self._last is not None or (self._looks and one.step < self._looks[-1][0]):
            self._looks.clear()
            self._last = None
        before = self._looks[-1] if self._looks else None
        self._looks.append((one.step, one.phase_seconds, one.waiting))
        if before is not None and one.step > before[0] and len(one.phase_seconds) == len(Phase):
            self._work.append(_own(_less(one.phase_seconds, before[1])) / (one.step - before[0]))
        self.host, self.node = one.host, one.node
        self._now = replace(
            self._now, phase="" if ended else one.phase, ended=ended, step=one.step, still_seconds=one.still_seconds
        )

    def see_step(self, step: Step) -> None:
        """It has written down a step."""
        if self._last is None:  # its agent has fallen silent
            self._looks.clear()
        self._last = step
        total = {**step.phase_seconds} or {"forward": step.seconds}
        self._work.append(sum(total.get(phase.word, 0.0) for phase in OWN))
        before = self._looks[-1][1] if self._looks else (0.0,) * len(Phase)
        spent = tuple(b + total.get(phase.word, 0.0) for b, phase in zip(before, Phase, strict=True))
        self._looks.append((step.step, spent, False))
        self._now = replace(self._now, step=step.step)

    def spent(self) -> tuple[float, ...] | None:
        """Seconds a step in each phase, lately; None where nobody says."""
        if len(self._looks) < 2 or not (steps := self._looks[-1][0] - self._looks[0][0]):
            return None
        if any(len(look[1]) != len(Phase) for look in self._looks):
            return None
        return tuple(seconds / steps for seconds in _less(self._looks[-1][1], self._looks[0][1]))

    def now(self) -> RankNow:
        """How it is to be shown."""
        spent, still = self.spent(), self._now.still_seconds
        of_steps = sum(spent[phase] for phase in (*OWN, Phase.SYNC)) if spent else 0.0
        if spent and of_steps > 0:
            waits = spent[Phase.SYNC] / of_steps
        else:  # a script: how often its watcher saw it wait
            waits = sum(look[2] for look in self._looks) / len(self._looks) if self._looks else None
        if self._last is not None and not self._now.phase:
            still = max(0.0, time.time() - self._last.unix_time)
        return replace(self._now, host=self.host, waits=waits, work_seconds=tuple(self._work), still_seconds=still)


def _less(now: Sequence[float], before: Sequence[float]) -> list[float]:
    return [max(0.0, b - a) for a, b in zip(before, now, strict=True)] if len(now) == len(before) else []


def _own(spent: Sequence[float]) -> float:
    return sum(spent[phase] for phase in OWN) if spent else 0.0
