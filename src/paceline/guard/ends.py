"""How did a rank end, and did it bring that about itself?"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from enum import Enum

from paceline.contract.evidence import Evidence
from paceline.contract.failure import GOOD_ENDS, speaks_of_lost_peer

# what transports say of two ranks that have entered different things: the one who says it may be the innocent one
ODDS = re.compile(
    r"gloo::EnforceNotMet|op\.preamble|Detected mismatch between collectives|failed to pass monitoredBarrier", re.I
)


class End(Enum):
    """How a rank ended, or that it runs."""

    RUNS = 1
    LEFT = 2  # in good order
    DIED = 3  # by itself
    VICTIM = 4  # because it lost others
    BROKEN = 5  # by its transport, in a collective: it is at odds with another rank, nobody knows yet who is right


def end_of(one: Evidence) -> End:
    """What is known of a rank's end; one that tidies up after an exception has ended."""
    if one.lost:
        return End.DIED
    if one.code is None and not one.words:
        return End.RUNS
    if one.code in GOOD_ENDS:
        return End.LEFT
    if one.code == -signal.SIGKILL:  # from outside, whatever the log says
        return End.DIED
    if ODDS.search(one.words):
        return End.BROKEN
    if speaks_of_lost_peer(one.words):
        return End.VICTIM
    in_flight = bool(one.ops) and not one.ops[-1].done
    return End.BROKEN if one.code == -signal.SIGABRT and in_flight else End.DIED


def parameters(evidence: Iterable[Evidence]) -> dict[int, int]:
    """How many parameters each rank's model has, of ranks that ended because torch found models to differ."""
    words = {one.rank: re.search(r"\bRank (\d{1,6}) has (\d{1,9}) params\b", one.words) for one in evidence}
    return {rank: int(match[2]) for rank, match in words.items() if match is not None and int(match[1]) == rank}
