"""Classifies how ranks ended, finds the one that failed first, and decides when a diagnosis is due. Without I/O.

If a rank fails, all others fail within milliseconds, with longer messages ("Connection closed by peer", aborts out of
C++ destructors). The order of exits therefore proves little: a rank that cleans up for three seconds exits last.
Failures are ranked by kind, in the order of `RankEndKind`. Within one kind the earliest counts, by the monotonic clock
of the coordinator (other hosts report ages, not times).
"""

import re
import signal
from collections.abc import Iterable, Sequence
from enum import IntEnum

from paceline.protocol.evidence import SUCCESS_EXIT_CODES, Evidence, RankSample, mentions_lost_peer

# from the first failure to the diagnosis, so that the diagnosis includes simultaneous failures
DIAGNOSIS_DELAY_SECONDS = 0.3
# from the end of the first victim to the diagnosis, if no primary failure is reported
VICTIM_DIAGNOSIS_DELAY_SECONDS = 4.0
MAX_CLEANUP_SECONDS = 60.0  # from an exception to the diagnosis, if neither this process ends nor another rank fails

# Errors of transports if two ranks have entered different operations. Either rank may report it, even the correct one.
MISMATCH_ERROR_PATTERN = re.compile(
    r"gloo::EnforceNotMet|op\.preamble|Detected mismatch between collectives|failed to pass monitoredBarrier", re.I
)


class RankEndKind(IntEnum):
    """How a rank ended, or that it runs. If several ranks failed, the lowest value explains the other failures best."""

    LOST = 1  # lost with its node, which is powered off or unreachable
    SIGNAL = 2  # killed by a signal that paceline did not send; the rank could not write a record
    EXCEPTION = 3  # an exception that other ranks did not cause, recorded when it was caught
    EXIT = 4  # a nonzero exit code without a record
    VICTIM = 5  # its exception or its last output reports lost peers
    BROKEN = 6  # ended by its transport in a collective that mismatches another rank's; either rank may be wrong
    LEFT = 7  # ended with code 0, or after saving a checkpoint
    RUNS = 8

    @property
    def is_primary(self) -> bool:
        """Whether the rank failed, and no evidence shows that another rank is the cause."""
        return self <= RankEndKind.EXIT


def classify_rank_end(sample: RankSample) -> RankEndKind:
    """How a rank ended. A rank that cleans up after an exception counts as ended."""
    if sample.lost_reason:
        return RankEndKind.LOST
    if sample.code in SUCCESS_EXIT_CODES:
        return RankEndKind.LEFT
    if sample.failure:  # the process failed here; a later signal only interrupted its teardown
        return RankEndKind.VICTIM if sample.failure.victim else RankEndKind.EXCEPTION
    if sample.code is None:
        return RankEndKind.RUNS
    # SIGKILL comes from outside, for any log. With gloo, victims end by SIGABRT or SIGSEGV.
    if sample.code != -signal.SIGKILL and mentions_lost_peer(sample.error_text):
        return RankEndKind.VICTIM
    return RankEndKind.SIGNAL if sample.code < 0 else RankEndKind.EXIT


def classify_rank_end_with_ops(rank: Evidence) -> RankEndKind:
    """As `classify_rank_end`, but uses the rank's operations: the result is BROKEN if its transport ended the rank."""
    end = classify_rank_end(rank)
    if end in (RankEndKind.LOST, RankEndKind.LEFT, RankEndKind.RUNS) or rank.code == -signal.SIGKILL:
        return end
    aborted = rank.code == -signal.SIGABRT and end is RankEndKind.SIGNAL and bool(rank.ops) and not rank.ops[-1].done
    return RankEndKind.BROKEN if aborted or MISMATCH_ERROR_PATTERN.search(rank.error_text) else end


def first_to_fail(samples: Iterable[RankSample]) -> RankSample | None:
    # cheap filter first: few of thousands of ranks have ended
    ended = (s for s in samples if s.code is not None or s.failure is not None or s.lost_reason)
    failed = [sample for sample in ended if classify_rank_end(sample) <= RankEndKind.VICTIM]
    return min(failed, key=lambda s: (classify_rank_end(s), s.failed_at_seconds, s.rank), default=None)


def diagnosis_due_at_seconds(samples: Sequence[RankSample]) -> float | None:
    """The monotonic time in seconds at which the diagnosis is due; None while no rank has failed.

    Example: one rank raises an exception and cleans up for 3 s. The others lose it and end as victims. The record of
    the first rank exists already, so the diagnosis is due THREAD_END_SECONDS after the first end, not after the last.
    """
    first = first_to_fail(samples)
    if first is None:
        return None
    ended_seconds = [sample.ended_seconds for sample in samples if sample.ended_badly]
    if not any(sample.is_running for sample in samples):
        return max(ended_seconds, default=None)
    if not ended_seconds:
        return first.failed_at_seconds + MAX_CLEANUP_SECONDS
    if classify_rank_end(first) is RankEndKind.VICTIM:
        return min(ended_seconds) + VICTIM_DIAGNOSIS_DELAY_SECONDS
    return max(min(ended_seconds), first.failed_at_seconds) + DIAGNOSIS_DELAY_SECONDS


def parameter_counts_by_rank(evidence: Iterable[Evidence]) -> dict[int, int]:
    """The parameter count of each rank that ended because torch found different models on the ranks."""
    matches = {s.rank: re.search(r"\bRank (\d{1,6}) has (\d{1,9}) params\b", s.error_text) for s in evidence}
    return {rank: int(match[2]) for rank, match in matches.items() if match is not None and int(match[1]) == rank}
