"""What a fault is, and what must be said of it. Data."""

from dataclasses import dataclass
from enum import StrEnum

# stated here, not taken from ExitCode: this is the truth that paceline is compared with
DONE, FAILED, USAGE, STALLED, MISMATCH, NOT_FINITE, DIVERGED = range(7)


class Way(StrEnum):
    """How the faulty program is started with paceline. Beside it torchrun always runs program.py."""

    SCRIPT = "script"  # paceline launch -- program.py
    TASK = "task"  # paceline train task.py:task
    EACH = "each"  # paceline launch -- sh -c "paceline train ...", each rank with settings of its own
    HOSTS = "hosts"  # program.py over several hosts


class Needs(StrEnum):
    """What the machine must allow."""

    NOTHING = "nothing"
    ROOT = "root"  # mounts or cgroups
    HOSTS = "hosts"  # root, and hosts made of network namespaces: tests/cluster/soak_faults.py


class Fate(StrEnum):
    """What was said of a run. The first ones are the judge's classes (`DiagnosisKind`), in lower case."""

    DIED = "died"
    LEFT = "left"
    STOPPED = "stopped"
    UNINTERRUPTIBLE = "uninterruptible"
    LOADER = "loader"
    BEHIND = "behind"
    MISMATCH = "mismatch"
    DEADLOCK = "deadlock"
    NETWORK = "network"
    NOT_MET = "not_met"
    UNKNOWN = "unknown"
    SWALLOWED = "swallowed"
    # said without the judge
    NOT_FINITE = "not finite"
    DIVERGED = "diverged"
    SLOW = "slow"
    LOST = "lost"  # a host, or its agent
    REFUSED = "refused"  # before the first step
    TOLD = "told"  # what is wrong; no rank is
    # nothing was said
    QUIET = "quiet"  # and the run was done
    ENDED = "ended"  # and the run ended in error
    HUNG = "hung"  # until our own limit


CODES = {
    Fate.DIED: FAILED, Fate.STOPPED: STALLED, Fate.UNINTERRUPTIBLE: STALLED, Fate.LOADER: STALLED, Fate.BEHIND: STALLED,
    Fate.NOT_MET: STALLED, Fate.MISMATCH: MISMATCH, Fate.NOT_FINITE: NOT_FINITE, Fate.DIVERGED: DIVERGED,
    Fate.SWALLOWED: MISMATCH, Fate.SLOW: DONE, Fate.QUIET: DONE, Fate.LOST: FAILED, Fate.REFUSED: USAGE,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, with the truth about it."""

    name: str
    does: str  # one sentence, without a subject: the guilty rank is
    ends: tuple[Fate, ...]  # right classes, the best first
    exits: tuple[int, ...] = ()  # right exit codes of paceline, where it is not the usual one of the first class
    causes: tuple[int, ...] = (1,)  # empty: nobody is
    step: int = 6
    world: int = 3
    way: Way = Way.SCRIPT
    needs: Needs = Needs.NOTHING
    tie: bool = False  # two ranks disagree: both must be named, and neither blamed
    line: bool = True  # the culprit's source line can be named
    words: str = ""  # a pattern that the text must hold, where no rank is the answer
    setup: str = ""  # what setups.py does first
    options: tuple[str, ...] = ()  # further ones of paceline
    beside: bool = True  # torchrun can have it too
    fast: bool = False  # nobody has to wait for a window: killed or raised
    late: bool = False  # thought out after the judge was finished

    @property
    def codes(self) -> tuple[int, ...]:
        """The right exit codes of paceline."""
        return self.exits or (CODES[self.ends[0]],)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Where it strikes, also where nobody is to blame."""
        return self.causes or (1,)

    @property
    def single(self) -> bool:
        """Whether there is one culprit, to be named in every repetition."""
        return len(self.causes) == 1 and not self.tie

    @property
    def silent(self) -> bool:
        """Whether nothing is wrong, and an alarm would be."""
        return self.ends == (Fate.QUIET,)
