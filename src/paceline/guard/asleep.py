"""Finds a rank of a script that sleeps while others wait for it, long before the window of scripts is over. Pure.

A script may evaluate for half an hour while others wait, download, or wait for a program that it has started; all that
looks like a hang. One thing does not: the main thread is in one and the same sleep all the time, in the kernel's own
word and by its count of switches. Nothing will wake it but its clock; or nothing at all, where it is stopped, or waits
for a thread of its own while all of them wait. So it is asked twice, and nobody is ended who has slept for less than
45 s.
"""

from collections.abc import Sequence

from paceline.contract.evidence import Evidence, Sample, Verdict, VerdictKind
from paceline.contract.windows import Windows

FIRST_SECONDS, SURE_SECONDS = 20.0, 45.0
AGAIN_SECONDS = 15.0


class Asleep:
    """What was seen of one generation in this standstill."""

    def __init__(self, windows: Windows) -> None:
        self._auto = windows.seconds is None
        self._next_seconds, self._asked = FIRST_SECONDS, False
        self._before: dict[int, int] = {}

    def due(self, running: Sequence[Sample]) -> bool:
        """Whether it is time to ask how the ranks sleep."""
        self._asked = False
        still_seconds = min((one.still_seconds for one in running), default=0.0)
        if still_seconds < FIRST_SECONDS:
            self._next_seconds = FIRST_SECONDS
            self._before.clear()
        if not self._auto or still_seconds < self._next_seconds or not all(one.script and one.step for one in running):
            return False
        self._asked = True
        self._next_seconds = max(SURE_SECONDS, still_seconds + AGAIN_SECONDS)
        return True

    def proves(self, verdict: Verdict, evidence: Sequence[Evidence]) -> bool | None:
        """Whether those that the verdict blames have slept one sleep since it was asked before; None: it was not."""
        if not self._asked:
            return None
        now = {one.rank: one.sleep for one in evidence if one.sleep >= 0}
        before, self._before = self._before, now
        if min(one.still_seconds for one in evidence if one.runs) < SURE_SECONDS:
            return False
        if verdict.kind in (VerdictKind.MISMATCH, VerdictKind.DEADLOCK):
            return True
        return bool(verdict.guilty) and all(rank in now and before.get(rank) == now[rank] for rank in verdict.guilty)
