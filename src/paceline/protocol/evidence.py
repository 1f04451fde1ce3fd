"""The records about the state of a rank. Agents collect them and send them to each other.

The clocks of two hosts cannot be compared, so agents send ages.
"""

import re
from enum import IntEnum
from typing import Any, Literal, Self

import msgspec
from msgspec.structs import replace

from paceline.errors import ExitCode, ReportedByPeer

SUCCESS_EXIT_CODES = (ExitCode.DONE, ExitCode.SAVED)

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
LOADER_KILLED = re.compile(r"DataLoader worker .* killed by signal: Killed")  # torch's message
TRANSPORT_TYPES = frozenset({"DistNetworkError", "DistStoreError"})
# torch also raises these for lost peers
TORCH_ERROR_TYPES = frozenset({"RuntimeError", "DistError", "DistBackendError"})
SHARED_GROUP = "shared"  # the group of ranks with shared memory; on several hosts, the prefix of such groups
BLOCK_PREFIX = "block "  # of the names of collectives that belong to a block of a model, with strategy fsdp
LIVE = "live.json"  # in the folder of the attempt: all ranks, written each second
WATCHED_FILE = "watched"  # in the same folder: `paceline watch` touches it repeatedly
CHECKPOINT_ASK = "ask-checkpoint-"  # prefix of a file that requests a checkpoint after the current step
MAX_LIVE_BYTES = 4 << 20


class Failure(msgspec.Struct, frozen=True):
    """How a worker failed, written by the worker: the content of error-<rank>.json."""

    rank: int
    host: str
    pid: int
    exit_code: int
    type: str
    message: str
    traceback: str  # empty if the message is sufficient
    victim: bool
    monotonic_seconds: float  # when the error was caught, by CLOCK_MONOTONIC: comparable on one host only
    code: str = ""  # code and fields of an error of paceline
    fields: dict[str, Any] = {}


def mentions_lost_peer(text: str) -> bool:
    text = text.lower()
    return any(phrase in text for phrase in PEER_LOST)


def is_lost_peer_error(error: BaseException) -> bool:
    """Whether `error` or one of its causes only reports lost ranks. Uses names of types, without torch."""
    seen_ids: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen_ids:  # a chain of causes may be cyclic
        if _says_peers_are_gone(current):
            return True
        seen_ids.add(id(current))
        current = current.__cause__
    return False


def _says_peers_are_gone(error: BaseException) -> bool:
    if isinstance(error, ReportedByPeer):
        return True
    names = {base.__name__ for base in type(error).__mro__}
    if names & TRANSPORT_TYPES:
        return "failed to listen" not in str(error)  # the store itself failed on this rank
    # torch raises no bare ConnectionResetError: a download of the user failed, which is a primary failure
    return bool(names & TORCH_ERROR_TYPES) and mentions_lost_peer(str(error))


class Phase(IntEnum):
    """The activity of a rank. The status page contains the number."""

    USER = 0  # code of a script that reports no phases
    INIT = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    SYNC = 5  # waiting for other ranks
    OPTIMIZER = 6
    EVALUATE = 7
    CHECKPOINT = 8
    CLOSE = 9  # after the last step

    word: str  # the name in messages

    def __init__(self, _: int) -> None:
        self.word = self._name_.lower()  # cached, because each step reads it several times


class Op(msgspec.Struct, frozen=True, omit_defaults=True):
    """One collective or one point-to-point message, from the view of the rank that called it."""

    group: str  # torch's name of the process group
    seq: int  # its number among this rank's collectives of the group, from 1; a message: among those to that peer
    kind: str  # all_reduce, broadcast, barrier, send, recv, ...
    name: str = ""  # "bucket 3"; empty if the caller gave none
    shape: str = ""  # "[1732]"; of several tensors "[4, 3] [4]"
    dtype: str = ""  # float32
    site: str = ""  # "train.py:97 in step": see rank/sites.py
    peer: int | None = None  # a rank of the world: the peer of a message, or the root of a broadcast, gather, ...
    done: bool = False  # whether this rank has completed it

    @property
    def is_message(self) -> bool:
        return self.kind in ("send", "recv", "isend", "irecv")

    @property
    def signature(self) -> tuple[str, str, str, str]:
        return self.kind, self.name, self.shape, self.dtype


class Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    file: str
    line: int
    function: str
    library: bool = False  # whether the file belongs to a library other than torch


class Stack(msgspec.Struct, frozen=True):
    thread: str  # the name of the thread; "main" for the main thread
    frames: tuple[Frame, ...]


class WorkerAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    ops: tuple[Op, ...] = ()  # the last operations, the oldest first: from the ring and from torch's flight recorder
    groups: dict[str, tuple[int, ...]] = {}  # name -> ranks of the world; () means all ranks
    titles: dict[str, str] = {}  # name -> description from the creator of the group, "tensor of the mesh"
    stacks: tuple[Stack, ...] = ()  # the main thread first


class LoaderWorker(msgspec.Struct, frozen=True, omit_defaults=True):
    number: int
    pid: int
    item: int  # index of the current or last sample
    epoch: int = 0
    state: str = ""  # state of its process: R, S, D, T, Z; empty: ended
    busy: bool = True  # whether it is loading the item now


class ScriptFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """A fault that a rank found in the script that it runs."""

    kind: Literal["not finite", "swallowed", "collective", "stale", "thread", "left"]
    step: int  # the step that followed, from 1
    text: str = msgspec.field(name="words")  # the predicate of a sentence about the rank
    own: bool = True  # whether the fault began on this rank, not in a gradient that was summed over ranks
    last: bool = False  # whether the rank took no further step and ended with code 0


class RankSample(msgspec.Struct, frozen=True, omit_defaults=True):
    rank: int
    host: str
    pid: int
    node: int = 0
    code: int | None = None  # the exit code; -n if signal n killed it; None while it runs
    lost_reason: str = msgspec.field(default="", name="lost")  # why its node is lost; empty otherwise
    ended_seconds: float = 0.0
    """The monotonic time of its end, or of the last message from its lost node. An age in messages between agents."""
    failure: Failure | None = None  # the rank's failure record
    error_text: str = msgspec.field(default="", name="words")  # its exception or end of its log, if failed or ending
    step: int = 0  # steps done, including those before a restart
    phase: Phase = Phase.USER
    phase_seconds: tuple[float, ...] = ()  # time in each phase, up to the last step; in the first step, up to now
    still_seconds: float = 0.0  # time without progress
    waiting: bool = False  # whether it waits for other ranks
    met: bool = False  # whether it has called a collective
    script: bool = False  # an unmodified script: hooks in torch count its steps and phases
    uneven: bool = False  # whether ranks may take different numbers of steps
    virtual_ranks: int = 0  # of the run, if it has a folder for checkpoints; 0: not known
    own_virtual_ranks: int = 0  # of them, the number that this rank computes
    max_virtual_ranks: int = 0  # that the memory of this rank allows, with `--balance auto`; 0: not known
    alone: int = 0  # steps that it took alone before it trained with others
    fingerprints: bytes = b""  # fingerprints of values that must be equal on ranks: see marks.py
    orders: bytes = b""  # the order of its collectives
    findings: tuple[ScriptFault, ...] = ()
    queued_seconds: float = 0.0  # total time that its main thread has waited for a core
    stop_signal: int = 0  # number of a stop signal that it received itself; 0: none
    stop_asked: bool = False  # whether it waits after its next step for the number of the last one
    steps_ended: int = 0  # number of steps after which it could stop

    @property
    def joint_steps(self) -> int:
        return self.step - self.alone

    @property
    def is_running(self) -> bool:
        return self.code is None and not self.lost_reason

    @property
    def ended_badly(self) -> bool:
        return bool(self.lost_reason) or self.code not in (None, *SUCCESS_EXIT_CODES)

    @property
    def failed_at_seconds(self) -> float:
        return self.failure.monotonic_seconds if self.failure else self.ended_seconds

    @property
    def shell_exit_code(self) -> int:
        """The exit code in a shell. A failure record takes precedence, because teardown may still crash."""
        if self.lost_reason:
            return ExitCode.FAILED
        if self.failure:
            return self.failure.exit_code
        code = self.code or 0
        return 128 - code if code < 0 else code

    @property
    def stepped(self) -> bool | None:
        """Whether its optimizer has stepped since this start; None: unknown."""
        reports_phases = self.phase is not Phase.USER and not self.script and self.phase_seconds
        return self.phase_seconds[Phase.OPTIMIZER] > 0 if reports_phases else None

    def swap_times_and_ages(self, now_seconds: float) -> Self:
        """A copy with times replaced by ages, for sending; for a received sample, with ages replaced by times.

        The error is the transfer time, a few milliseconds.
        """
        failure = self.failure
        if failure is not None:
            failure = replace(failure, monotonic_seconds=now_seconds - failure.monotonic_seconds)
        has_ended = self.code is not None or self.lost_reason
        return replace(self, failure=failure, ended_seconds=now_seconds - self.ended_seconds if has_ended else 0.0)


class Evidence(RankSample, frozen=True, omit_defaults=True):
    state: str = ""  # process state from /proc: R running, S sleeping, D in I/O, T stopped, Z; empty: ended
    cpu_seconds: float = 0.0  # CPU seconds used in the last second without progress
    sleep: int = -1  # the number of a sleep from which no other thread wakes the main thread; -1: none
    watched: bool = True  # False: it has become a different program (exec), which the agent cannot inspect
    answered: bool = False  # whether the interpreter answered; False: GIL held, stopped, or ended
    ops: tuple[Op, ...] = ()  # the last operations, the oldest first
    groups: dict[str, tuple[int, ...]] = {}  # name -> ranks of the world, for groups of this rank; () means all
    titles: dict[str, str] = {}  # descriptions of some groups, from their creator
    stacks: tuple[Stack, ...] = ()  # the main thread first
    native: str = ""  # the text of faulthandler, if the interpreter did not answer
    loaders: tuple[LoaderWorker, ...] = ()
    gpu: str = ""  # why its GPU is slow
    calls: dict[str, Op] = {}  # the calls of a script, by the hash in its orders

    @classmethod
    def from_sample(cls, sample: RankSample) -> Self:
        return cls(*(getattr(sample, name) for name in RankSample.__struct_fields__))


class DiagnosisKind(IntEnum):
    """The causes of a stop, the most certain first."""

    DIED = 1  # killed, or ended with an error
    LEFT = 2  # ended with code 0 while others were not done
    STOPPED = 3  # frozen by a signal (SIGSTOP, a debugger), state T
    UNINTERRUPTIBLE = 4  # in the kernel, state D: a disk or network file system that does not answer
    LOADER = 5  # waits for a process that loads data, which hangs or has ended
    BEHIND = 6  # did not enter the collective in which the others wait
    MISMATCH = 7  # entered a different collective, or one with a different shape or type
    DEADLOCK = 8  # ranks wait for each other in a cycle: they entered groups in different orders
    NETWORK = 9  # all wait in the same collective: the network does not transfer the data
    NOT_MET = 10  # some ranks have not reached the first collective
    UNKNOWN = 11
    DIVERGED = 12  # its parameters differ from those of the others
    NOT_FINITE = 13  # its gradients are NaN or infinite, and were applied
    SWALLOWED = 14  # a collective failed, and the script swallowed the error


class Diagnosis(msgspec.Struct, frozen=True, omit_defaults=True):
    """The cause of a stop, and the ranks that caused it. `causes` is empty if the cause is not in a single party."""

    kind: DiagnosisKind
    causes: tuple[int, ...] = ()
    tie: tuple[tuple[int, ...], ...] = ()  # parties of which one must be wrong; `causes` is empty then
    sentences: tuple[str, ...] = ()  # the actions of each party; the cause first
    op: Op | None = None  # the collective in which the other ranks wait
    site: str = ""  # "train.py:88 in load_batch": the line of the first rank in `causes`
    step: int = 0  # the highest number of completed steps
    failed: int | None = None  # the rank that failed first, if its failure explains the stop


class LiveSamples(msgspec.Struct, frozen=True):
    unix_time: float
    generation: int
    ranks: tuple[RankSample, ...]
