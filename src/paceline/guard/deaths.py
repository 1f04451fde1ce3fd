"""Finds out how ranks ended, which of them failed first, and when a verdict is due. Pure.

If a rank fails, all others fail within milliseconds, with louder messages ("Connection closed by peer", aborts out of
C++ destructors). The first *exit* therefore proves little: a rank that cleans up for three seconds ends last. The kind
of the end counts, in the order of `RankEnd`; within one kind, the first on the monotonic clock of the head counts
(other hosts report ages, not times).
"""

import re
import signal
from collections.abc import Iterable, Sequence
from enum import IntEnum

from paceline.protocol.evidence import GOOD_ENDS, Evidence, Sample, speaks_of_lost_peer

SETTLE_SECONDS = 0.3  # from the first failure to the verdict: what failed at the same moment shall be seen too
VICTIM_SECONDS = 4.0  # from the first victim's end to the verdict, where no better culprit shows up
CLEANUP_SECONDS = 60.0  # from an exception to the verdict, where the process neither ends nor any other fails

# what transports say of two ranks that have entered different things: the one who says it may be the innocent one
MISMATCH_TEXT = re.compile(
    r"gloo::EnforceNotMet|op\.preamble|Detected mismatch between collectives|failed to pass monitoredBarrier", re.I
)


class RankEnd(IntEnum):
    """How a rank ended, or that it runs. Of several failures the first one here explains the others best."""

    LOST = 1  # with its whole node: powered off, or cut off from the others
    SIGNAL = 2  # by a signal that nobody of ours sent: such a rank had no chance to write a record
    EXCEPTION = 3  # of its own, recorded at the moment it was caught
    EXIT = 4  # with a code that is not 0, without a record
    VICTIM = 5  # because it lost others: its exception or its last output speaks of them
    BROKEN = 6  # by its transport, in a collective: at odds with another rank, nobody knows yet who is right
    LEFT = 7  # in good order
    RUNS = 8

    @property
    def is_primary(self) -> bool:
        """Whether the rank failed, and no other rank is known to be the cause."""
        return self <= RankEnd.EXIT


def rank_end(one: Sample) -> RankEnd:
    """How a rank ended; a rank that cleans up after an exception has ended."""
    if one.lost:
        return RankEnd.LOST
    if one.code in GOOD_ENDS:
        return RankEnd.LEFT
    if one.failure:  # whatever ended the process afterwards, even a signal, was its teardown
        return RankEnd.VICTIM if one.failure.victim else RankEnd.EXCEPTION
    if one.code is None:
        return RankEnd.RUNS
    # SIGKILL comes from outside whatever the log says; SIGABRT and SIGSEGV are how gloo's victims end
    if one.code != -signal.SIGKILL and speaks_of_lost_peer(one.words):
        return RankEnd.VICTIM
    return RankEnd.SIGNAL if one.code < 0 else RankEnd.EXIT


def rank_end_in_collective(one: Evidence) -> RankEnd:
    """As `rank_end`, if the rank's operations are known: an end that its transport has caused is BROKEN."""
    end = rank_end(one)
    if end in (RankEnd.LOST, RankEnd.LEFT, RankEnd.RUNS) or one.code == -signal.SIGKILL:
        return end
    aborted = one.code == -signal.SIGABRT and end is RankEnd.SIGNAL and bool(one.ops) and not one.ops[-1].done
    return RankEnd.BROKEN if aborted or MISMATCH_TEXT.search(one.words) else end


def first_to_fail(samples: Iterable[Sample]) -> Sample | None:
    """The rank whose failure explains the others' best; None if no rank failed."""
    ended = (one for one in samples if one.code is not None or one.failure is not None or one.lost)  # of thousands, few
    failed = [one for one in ended if rank_end(one) <= RankEnd.VICTIM]
    return min(failed, key=lambda one: (rank_end(one), one.failed_at_seconds, one.rank), default=None)


def due_seconds(samples: Sequence[Sample]) -> float | None:
    """When (monotonic seconds) to stop waiting for a better explanation; None while no rank has failed.

    Example: one rank raises and cleans up for 3 s, and the others lose it. Their records are those of victims, but the
    record of the first rank exists already, so the verdict is due SETTLE_SECONDS after the first end, not the last.
    """
    first = first_to_fail(samples)
    if first is None:
        return None
    ended = [one.ended_seconds for one in samples if one.ended_badly]
    if not any(one.runs for one in samples):
        return max(ended, default=None)
    if not ended:
        return first.failed_at_seconds + CLEANUP_SECONDS
    if rank_end(first) is RankEnd.VICTIM:
        return min(ended) + VICTIM_SECONDS
    return max(min(ended), first.failed_at_seconds) + SETTLE_SECONDS


def parameter_counts(evidence: Iterable[Evidence]) -> dict[int, int]:
    """How many parameters each rank's model has, of ranks that ended because torch found models to differ."""
    words = {one.rank: re.search(r"\bRank (\d{1,6}) has (\d{1,9}) params\b", one.words) for one in evidence}
    return {rank: int(match[2]) for rank, match in words.items() if match is not None and int(match[1]) == rank}
