"""The records of a rank after its start, as its agent sees it. Agents send them to each other.

    Failure     how a rank failed, written by the rank
    Sample      one moment of a rank: its process and its status page. The heartbeat of agents
    Evidence    a sample, and the answers of the rank: stacks, collectives. The only input of the judge
    Verdict     the cause, and which ranks it is in
    Live        all ranks at this moment, written by the head agent while `paceline watch` runs

The clocks of two hosts cannot be compared, so agents send ages.
"""

import re
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Literal, Self

import msgspec
from msgspec.structs import replace

from paceline.errors import ExitCode, ReportedByPeer

GOOD_ENDS = (ExitCode.DONE, ExitCode.SAVED)

PEER_LOST = (  # lower case
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",  # TCPStore's client
    "broken pipe",
    "timed out waiting",
    "application timeout caused pair closure",
    "connectfullmesh",
    "wait timeout after",  # TCPStore.wait
    "socket timeout",
    "client socket has timed out",
    "failed to recv, got 0 bytes",
    "ncclremoteerror",
    "communicator was aborted",
    "watchdog caught collective operation timeout",
    "remote process exited or there was a network error",
)
LOADER_KILLED = re.compile(r"DataLoader worker .* killed by signal: Killed")  # torch's words for it
TRANSPORT_TYPES = frozenset({"DistNetworkError", "DistStoreError"})
LIBRARY_TYPES = frozenset({"RuntimeError", "DistError", "DistBackendError"})  # torch raises lost peers as these, too
SHARED_GROUP = "shared"
"""the group of ranks that share memory; the names of those on several hosts begin with it"""
BLOCK = "block "
"""the start of the names of collectives that belong to a block of a model, under strategy fsdp"""
LIVE = "live.json"  # in the attempt's folder: all ranks, each second
WATCHED = "watched"  # beside it: whoever watches touches it, again and again
CHECKPOINT_ASK = "ask-checkpoint-"  # and what follows is the asker's own: save after this step
MAX_LIVE_BYTES = 4 << 20


class Failure(msgspec.Struct, frozen=True):
    """How a worker failed, written by the worker: the content of error-<rank>.json."""

    rank: int
    host: str
    pid: int
    exit_code: int
    type: str
    message: str
    traceback: str  # empty where the message says it all
    victim: bool
    monotonic_seconds: float  # when it was caught, on the host's CLOCK_MONOTONIC: comparable on one host only
    code: str = ""  # with the fields, of an error of paceline's
    fields: dict[str, Any] = {}


def speaks_of_lost_peer(text: str) -> bool:
    """Whether a message or the end of a log reports a lost peer."""
    text = text.lower()
    return any(phrase in text for phrase in PEER_LOST)


def is_victim(error: BaseException) -> bool:
    """Whether `error` or one of its causes only reports that other ranks are gone. Decided by names, without torch."""
    return any(_says_peers_are_gone(cause) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:  # a hand-made chain may be a ring
        seen.add(id(current))
        yield current
        current = current.__cause__


def _says_peers_are_gone(error: BaseException) -> bool:
    if isinstance(error, ReportedByPeer):
        return True
    names = {base.__name__ for base in type(error).__mro__}
    if names & TRANSPORT_TYPES:
        return "failed to listen" not in str(error)  # the store's own side of it: nobody else is to blame
    # A bare ConnectionResetError is not torch's: the user's own download failed, and that is a culprit.
    return bool(names & LIBRARY_TYPES) and speaks_of_lost_peer(str(error))


class Phase(IntEnum):
    """The activity of a rank. The status page holds the number."""

    USER = 0  # a script that says nothing about itself
    INIT = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    SYNC = 5  # waiting for other ranks
    OPTIMIZER = 6
    EVALUATE = 7
    CHECKPOINT = 8
    CLOSE = 9  # after the last step

    word: str
    """for people"""

    def __init__(self, _: int) -> None:
        self.word = self._name_.lower()  # made once: each step reads it several times


class Op(msgspec.Struct, frozen=True, omit_defaults=True):
    """One collective, or one message to a peer, as seen by the rank that called it."""

    group: str  # torch's name of the process group
    seq: int  # its number among the group's collectives on this rank, from 1; of messages among those to that peer
    kind: str  # all_reduce, broadcast, barrier, send, recv, ...
    name: str = ""  # "bucket 3"; empty where the caller gave none
    shape: str = ""  # "[1732]", several "[4, 3] [4]"
    dtype: str = ""  # float32
    site: str = ""  # "train.py:97 in step": see worker.sites
    peer: int | None = None  # a rank of the world: the other one of a message; the root of a broadcast, gather, ...
    done: bool = False  # for this rank

    @property
    def is_message(self) -> bool:
        """Whether it is one half of a message between two ranks, not a collective."""
        return self.kind in ("send", "recv", "isend", "irecv")

    @property
    def signature(self) -> tuple[str, str, str, str]:
        """What all ranks of a collective must agree on."""
        return self.kind, self.name, self.shape, self.dtype


class Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a stack."""

    file: str
    line: int
    function: str
    library: bool = False  # somebody else's, which is neither the user's nor torch's


class Stack(msgspec.Struct, frozen=True):
    """One thread's, the innermost frame first."""

    thread: str  # its name; "main"
    frames: tuple[Frame, ...]


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of a rank's watcher to a question of the agent."""

    ops: tuple[Op, ...] = ()  # the last ones, the oldest first: of the ring, and those that torch itself has called
    groups: dict[str, tuple[int, ...]] = {}  # name -> ranks of the world; () is all of them
    titles: dict[str, str] = {}  # name -> what whoever made the group calls it, "tensor of the mesh"
    stacks: tuple[Stack, ...] = ()  # the main thread first
    enqueued: int = 0  # collectives of all groups so far, as torch counts them


class LoaderWorker(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process that loads data for the rank."""

    number: int
    pid: int
    item: int  # index of the sample it works on, or worked on last
    epoch: int = 0
    state: str = ""  # of its process: R, S, D, T, Z; empty: gone
    busy: bool = True  # it has begun the item, and not ended it


class ScriptFinding(msgspec.Struct, frozen=True, omit_defaults=True):
    """A fault that a rank found in the script that it runs."""

    kind: Literal["not finite", "swallowed", "collective", "stale", "thread", "left"]
    step: int  # that it was about to make, from 1
    words: str  # what was found, for a sentence that begins with the rank
    own: bool = True  # it began here: not a gradient that was summed over ranks
    last: bool = False  # the rank took no further step, and ended with code 0


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker at one moment, from /proc, its status page and its failure record."""

    rank: int
    host: str
    pid: int
    node: int = 0
    code: int | None = None  # its exit code, -n if signal n killed it; None while it runs
    lost: str = ""  # why its whole node is no longer heard of; empty where it is
    ended_seconds: float = 0.0
    """when its end was seen, or its lost node last heard, by the agent's monotonic clock; an age when it is sent"""
    failure: Failure | None = None  # its own record of it
    words: str = ""  # its exception, or the end of its log: where it has ended or is about to
    step: int = 0  # steps done, also those of earlier starts
    phase: Phase = Phase.USER
    phase_seconds: tuple[float, ...] = ()  # spent in each phase, up to its last change
    still_seconds: float = 0.0  # since anything of it has moved
    waiting: bool = False  # for other ranks
    met: bool = False  # it has called a collective
    script: bool = False  # that nobody changed: its steps and phases are seen from outside
    uneven: bool = False  # ranks may rightly take different numbers of steps
    alone: int = 0  # of its steps: those that it took for itself before it trained with others
    marks: bytes = b""  # what ranks must have in common: see marks.py
    orders: bytes = b""  # of its collectives
    findings: tuple[ScriptFinding, ...] = ()
    queued_seconds: float = 0.0  # that its main thread has waited for a core, so far

    @property
    def joint_steps(self) -> int:
        """The steps that it took with other ranks; all steps if it trains alone."""
        return self.step - self.alone

    @property
    def runs(self) -> bool:
        """Whether it runs, as far as is known."""
        return self.code is None and not self.lost

    @property
    def ended_badly(self) -> bool:
        """Whether it is gone, and neither done nor stopped in good order."""
        return bool(self.lost) or self.code not in (None, *GOOD_ENDS)

    @property
    def failed_at_seconds(self) -> float:
        """When it failed: an exception is older than the end of the process."""
        return self.failure.monotonic_seconds if self.failure else self.ended_seconds

    @property
    def exit_code(self) -> int:
        """What a shell would see; with a record what the worker meant, for a teardown can still crash."""
        if self.lost:
            return ExitCode.FAILED
        if self.failure:
            return self.failure.exit_code
        code = self.code or 0
        return 128 - code if code < 0 else code

    @property
    def stepped(self) -> bool | None:
        """Whether its optimizer has stepped since this start; None: unknown."""
        known = self.phase is not Phase.USER and not self.script and self.phase_seconds
        return self.phase_seconds[Phase.OPTIMIZER] > 0 if known else None

    def turned(self, now_seconds: float) -> Self:
        """The same with times replaced by ages, to be sent; for a received sample, with ages replaced by times.

        The error is the transfer time, some milliseconds.
        """
        failure = self.failure
        if failure is not None:
            failure = replace(failure, monotonic_seconds=now_seconds - failure.monotonic_seconds)
        ended = self.code is not None or self.lost
        return replace(self, failure=failure, ended_seconds=now_seconds - self.ended_seconds if ended else 0.0)


class Evidence(Sample, frozen=True, omit_defaults=True):
    """All that is known about one rank."""

    state: str = ""  # of the process, from /proc: R running, S sleeping, D in I/O, T stopped, Z; empty: gone
    cpu_seconds: float = 0.0  # that it has used within the last second or so of standing still
    sleep: int = -1  # its main thread sleeps, or is stopped, and nobody will wake it: in which sleep; -1: it does not
    reads_input: bool = False  # it waits for standard input
    watched: bool = True  # False: it has become another program, into which nobody sees
    answered: bool = False  # the interpreter took the question for its stacks; False: GIL held, stopped, or gone
    ops: tuple[Op, ...] = ()  # the last ones, the oldest first
    groups: dict[str, tuple[int, ...]] = {}  # name -> ranks of the world, as far as this rank is a member; () is all
    titles: dict[str, str] = {}  # of some of them: what whoever made the group calls it
    stacks: tuple[Stack, ...] = ()  # the main thread first
    native: str = ""  # faulthandler's text, where the interpreter did not answer
    loaders: tuple[LoaderWorker, ...] = ()
    gpu: str = ""  # what holds its GPU back, in words
    calls: dict[str, Op] = {}  # a script's, by the hash that stands in its orders

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """The evidence about a rank of which only a sample is known."""
        return cls(*(getattr(sample, name) for name in Sample.__struct_fields__))


class VerdictKind(IntEnum):
    """The causes of a stop, the most certain first."""

    DIED = 1  # killed, or ended with an error
    LEFT = 2  # ended with code 0 while others were not done
    STOPPED = 3  # frozen by a signal (SIGSTOP, a debugger), state T
    UNINTERRUPTIBLE = 4  # in the kernel, state D: a disk or network file system that does not answer
    LOADER = 5  # waits for a process that loads data, which hangs or is gone
    BEHIND = 6  # did not enter the collective in which the others wait
    MISMATCH = 7  # entered another one than the others, or one with another shape or type
    DEADLOCK = 8  # ranks wait for each other in a circle: groups entered in different orders
    NETWORK = 9  # all wait in the same collective: what is between them does not pass it on
    NOT_MET = 10  # before the first collective, some ranks have not come
    UNKNOWN = 11
    DIVERGED = 12  # its parameters are no longer those of the others
    NOT_FINITE = 13  # its gradients are NaN or infinite, and were applied
    SWALLOWED = 14  # a collective failed, and the script swallowed the error


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The cause of a stop, and the ranks in which it is. `guilty` is empty if no rank is known to be the cause."""

    kind: VerdictKind
    guilty: tuple[int, ...] = ()
    tie: tuple[tuple[int, ...], ...] = ()  # parties of equal weight, of which one must be wrong; guilty is empty then
    sentences: tuple[str, ...] = ()  # what each party did, in words; the guilty first
    op: Op | None = None  # the collective that it is about, as the waiting ranks see it
    site: str = ""  # "train.py:88 in load_batch": where the (first) guilty rank is
    step: int = 0  # how many steps the rank that has come furthest has done
    failed: int | None = None
    """the rank that failed first, if its failure explains everything; else None"""


class LiveRank(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank at this moment."""

    rank: int
    host: str
    pid: int
    node: int = 0
    code: int | None = None  # its exit code; None while it runs
    lost: bool = False  # with its whole node
    step: int = 0
    phase: str = Phase.USER.word
    phase_seconds: tuple[float, ...] = ()  # spent in each phase so far
    still_seconds: float = 0.0  # since anything of it has moved
    waiting: bool = False  # for other ranks

    @classmethod
    def of(cls, one: Sample) -> Self:
        """The part of a sample that `paceline watch` needs."""
        return cls(
            one.rank, one.host, one.pid, one.node, one.code, bool(one.lost), one.step, one.phase.word,
            tuple(round(seconds, 6) for seconds in one.phase_seconds), round(one.still_seconds, 1), one.waiting,
        )  # fmt: skip


class Live(msgspec.Struct, frozen=True):
    """All ranks of a generation."""

    unix_time: float
    generation: int
    ranks: tuple[LiveRank, ...]
