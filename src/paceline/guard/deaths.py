"""Which rank failed, and which only lost its peers? Pure: from what the agent observed to one primary failure.

One failing rank takes all others with it, within milliseconds and with louder messages ("Connection closed by peer",
aborts out of C++ destructors). The first *exit* therefore proves little: a culprit that tidies up for three seconds
dies last. What counts, in this order (FAULTS.md, table a.1):

    1. lost with its whole node: powered off, or cut off from the others
    2. killed by a signal that nobody of ours sent: such a rank had no chance to write a record
    3. an exception of its own, recorded at the moment it was caught
    4. a non-zero exit code without a record
    5. a victim: its exception or its last output speaks of lost peers

and within one kind, what came first on the judging agent's monotonic clock (other hosts report ages, not times).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from paceline.contract.failure import GOOD_ENDS, Failure, speaks_of_lost_peer
from paceline.errors import ExitCode

SETTLE_SECONDS = 0.3  # from the first failure to the verdict: what failed at the same moment shall be seen too
VICTIM_SECONDS = 4.0  # from the first victim's end to the verdict, where no better culprit shows up
CLEANUP_SECONDS = 60.0  # from an exception to the verdict, where the process neither ends nor any other fails


class Kind(IntEnum):
    """Kinds of failure, the best explanation of the others first."""

    LOST = 1
    SIGNAL = 2
    EXCEPTION = 3
    EXIT = 4
    VICTIM = 5
    STALLED = 6  # nobody had failed: the hang guard has ended the run


@dataclass(frozen=True)
class Observation:
    """What the agent knows of one worker: `code` is None while it runs, -n if signal n killed it."""

    rank: int
    host: str
    pid: int
    code: int | None
    seen_seconds: float  # when the agent saw it end, on its monotonic clock; meaningless while it runs
    record: Failure | None = None
    log_tail: str = ""
    lost: str = ""  # why its node is no longer heard of; empty where it is

    @property
    def ended_badly(self) -> bool:
        """Whether it is gone, and neither done nor stopped in good order."""
        return bool(self.lost) or self.code not in (None, *GOOD_ENDS)

    @property
    def failed(self) -> bool:
        """Whether it ended badly, or is about to: its exception is caught and it tidies up."""
        return self.ended_badly or (self.code is None and self.record is not None)

    @property
    def failed_at_seconds(self) -> float:
        """When it failed: an exception is older than the end of the process."""
        return self.record.monotonic_seconds if self.record else self.seen_seconds

    @property
    def exit_code(self) -> int:
        """What a shell would see; with a record what the worker meant, for a teardown can still crash."""
        if self.lost:
            return ExitCode.FAILED
        if self.record:
            return self.record.exit_code
        code = self.code or 0
        return 128 - code if code < 0 else code

    @property
    def kind(self) -> Kind:
        """What kind of failure this is; meaningless where it is none."""
        if self.lost:
            return Kind.LOST
        if self.record:  # whatever ended the process afterwards, even a signal, was its teardown
            return Kind.VICTIM if self.record.victim else Kind.EXCEPTION
        # SIGKILL comes from outside whatever the log says; SIGABRT and SIGSEGV are how gloo's victims end
        if self.code != -signal.SIGKILL and speaks_of_lost_peer(self.log_tail):
            return Kind.VICTIM
        return Kind.SIGNAL if (self.code or 0) < 0 else Kind.EXIT


def choose(observations: Sequence[Observation]) -> Observation | None:
    """The primary failure, or None where nobody failed."""
    failed = [o for o in observations if o.failed]
    return min(failed, key=lambda o: (o.kind, o.failed_at_seconds, o.rank), default=None)


def verdict_due_seconds(observations: Sequence[Observation]) -> float | None:
    """When (monotonic seconds) to stop waiting for a better culprit; None while nobody has failed.

    Example: one rank raises and tidies up for 3 s, the others lose it. Their records say victim, but the first one's
    record is there already, so the verdict is due SETTLE_SECONDS after the first end, not after the last.
    """
    primary = choose(observations)
    if primary is None:
        return None
    ended = [o.seen_seconds for o in observations if o.ended_badly]
    if all(o.code is not None or o.lost for o in observations):
        return max(ended, default=None)
    if not ended:
        return primary.failed_at_seconds + CLEANUP_SECONDS
    if primary.kind is Kind.VICTIM:
        return min(ended) + VICTIM_SECONDS
    return max(min(ended), primary.failed_at_seconds) + SETTLE_SECONDS
