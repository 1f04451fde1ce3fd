"""How long did a step spend in each of its phases? Two clock readings a phase, for the step's record."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.contract.evidence import Phase


class PhaseClock:
    """Passes each phase on to whoever is told, and adds up the seconds since the last `take`."""

    def __init__(self, enter: Callable[[Phase], object], clock: Callable[[], float] = time.perf_counter) -> None:
        self._enter, self._clock = enter, clock
        self._spent: dict[str, float] = {}
        self._phase: Phase | None = None
        self._since = 0.0

    def __call__(self, phase: Phase) -> None:
        """`phase` begins, and what went on until now is over."""
        self._end()
        self._phase = phase
        self._enter(phase)

    def take(self) -> dict[str, float]:
        """Seconds by the phase's word, since the last take; what follows counts only after the next phase begins."""
        self._end()
        self._phase = None
        spent, self._spent = self._spent, {}
        return spent

    def _end(self) -> None:
        now = self._clock()
        if self._phase is not None:
            self._spent[self._phase.word] = self._spent.get(self._phase.word, 0.0) + now - self._since
        self._since = now
