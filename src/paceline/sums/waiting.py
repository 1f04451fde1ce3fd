"""How does a rank wait for a word in memory that another process will write: told at once, and never for ever?

It looks without a pause for some tens of microseconds, which is what ranks in step are apart; then it sleeps, longer
the longer it has waited, so that a wait costs little of a core and ends at most a few percent late. Where there are
more ranks than cores, looking would only keep the awaited one waiting: there it lets others run between two looks.
That is nothing for a core of its own: a process that yields to a stranger's is back after milliseconds, one that has
slept at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

SPINS = 1000  # looks, of about 50 ns each
YIELD_SECONDS = 2e-4
SHORTEST_SLEEP_SECONDS = 2e-5
LONGEST_SLEEP_SECONDS = 1e-3
SLEEP_SHARE = 1 / 16  # of what has been waited so far

Look = Callable[[Callable[[], list[int]], float], None]
"""(who is missing just now, seconds waited so far): raises where there is no point in waiting any longer"""


def wait_for(lines: Sequence[memoryview], at: int, value: int, look: Look, *, spins: int = SPINS) -> None:
    """Return when word `at` of each of `lines` is `value` or more.

    Args:
        lines: of unsigned 64-bit words; one for each other process, who alone writes it, and never a smaller number.
        at: which word.
        value: to be reached.
        look: called between two sleeps.
        spins: looks without a pause; 0 where ranks share cores.
    """
    for line in lines:
        if line[at] < value:
            for _ in range(spins):
                if line[at] >= value:
                    break
            else:
                _wait_slowly(lines, at, value, look, 0.0 if spins else YIELD_SECONDS)
                return


def _wait_slowly(lines: Sequence[memoryview], at: int, value: int, look: Look, yield_seconds: float) -> None:
    def missing() -> list[int]:
        return [index for index, line in enumerate(lines) if line[at] < value]

    began = time.monotonic()
    while absent := missing():
        line = lines[absent[0]]
        while line[at] < value:
            waited_seconds = time.monotonic() - began
            if waited_seconds < yield_seconds:
                os.sched_yield()
            else:
                look(missing, waited_seconds)
                time.sleep(min(LONGEST_SLEEP_SECONDS, max(SHORTEST_SLEEP_SECONDS, waited_seconds * SLEEP_SHARE)))
