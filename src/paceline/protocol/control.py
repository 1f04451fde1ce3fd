"""The messages by which launcher, agent and ranks control each other, and the environment variables of paceline.

An agent starts a rank itself, or orders it from the preloader, a process that has imported everything and forks:

    agent                                   preloader (rank/preload.py)
    starts it, as it would start a rank     imports what every rank imports
                                            -> READY, or why no rank can be forked from it
    ForkOrder, with descriptors                 -> the rank's pid, when it is the agent's child
    a byte, once it knows the rank          the rank begins; without that byte it ends

A rank that another launcher started (`paceline watchover`) attaches to the agent of its node:

    rank -> agent    Hello, with two descriptors: its status page, and its failure record
    agent -> rank    Rendezvous, on node 0 of several, to local rank 0, which shows it to the other nodes' ranks
    rank -> agent    the same Rendezvous, on the other nodes
    rank -> agent    Goodbye, its last message; it waits until the agent closes the connection

They meet at a Unix socket without a file. Its name is no secret, so each end asks the kernel for the user of the other.
Each message is one packet. Nothing in a message is executed or unpickled. `Orders` are what a launcher, a
scheduler or a user sends to an agent: stop signals, and the lifeline.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import struct
import time
from collections.abc import Generator, Iterable, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol

import msgspec

ROOM = "paceline.rank."  # what runs in a rank
BOOTSTRAP = f"{ROOM}bootstrap"  # runs any script as a worker of our agent
CHECK = "--check"  # between the bootstrap and the script: it also records facts of the run
WORKER_SPEC = "PACELINE_WORKER"
FIRST_PORT, PORTS = 20000, 10000  # below the ports that kernels give to outgoing connections (Linux: from 32768)
READY = b"ready"
MAX_ORDER_BYTES = 1 << 20
MAX_DESCRIPTORS = 253  # that the kernel sends at once
LATE_PREFIXES = ("PACELINE_", "TORCHELASTIC_", "ROLE_", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LATE = (  # variables that differ between ranks or starts, and are only read when a process group is made
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
MAX_MESSAGE_BYTES = 1 << 16
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
TERMINALS = (signal.SIGINT, signal.SIGQUIT)  # a shell without job control has them ignored in what it starts with `&`
LIFELINE = 0  # stdin: held open by the launcher, who writes after the plan signs of life and orders, a line each
GRACE_SECONDS = 3.0  # from a request to a worker to stop until its kill; the sweep after it still ends within 5 s
LIFELINE_GRACE_SECONDS = min(2.0, GRACE_SECONDS)  # when the launcher is gone: nobody waits for a result any more
REMOTE_GRACE_SECONDS = 6.0  # when one at the other end of ssh is gone: time to save, and nothing left after 10 s
STOP_ORDERS = {f"stop {number.name}".encode(): number for number in STOP_SIGNALS}  # no signal crosses a network
RUN_ID = "PACELINE_RUN_ID"
SHARED_MEMORY = "PACELINE_SHARED_MEMORY"
PRELOAD = "PACELINE_PRELOAD"
AGENT_MARK = "PACELINE_AGENT_MARK"
# names of variables, and of anything else, whose values are not shown
SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|COOKIE", re.IGNORECASE)


class WorkerSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The data that a worker gets from its agent in addition to torchrun's variables, in one environment variable.

    The worker removes the variable from its environment, because its children are not the agent's: they neither end
    with it nor report to it. Descriptors are numbers of open files that the worker inherits; -1: none.
    """

    _here: ClassVar[WorkerSpec | None] = None

    agent_pid: int
    attempt_dir: str = ""
    generation: int = 0  # how often the run was restarted before
    record: int = -1  # memory, into which it writes why it fails
    box: int = -1  # memory, in which it shows what it does: see status_page.py
    store: int = -1  # where its ranks meet: memory with a FileStore in it, or rank 0's listening socket
    snapshots: tuple[tuple[int, int], ...] = ()  # two memory files for each rank of the node, kept over restarts
    temporary: str = ""  # a folder that goes with the agent, however it ends
    guarded: bool = True  # False: no hang guard, --stall-after off
    shares_gradients: bool = False  # DDP's, through shared memory: --collectives shared
    preload: int = -1  # of what workers are forked from, and is none: the socket on which the agent orders them

    @classmethod
    def here(cls, env: MutableMapping[str, str] = os.environ) -> WorkerSpec | None:
        """That of this process; None if no agent of paceline has started it."""
        if (
            text := env.pop(WORKER_SPEC, None)
        ) is not None:  # not only once: a forked worker gets its own after its fork
            WorkerSpec._here = msgspec.json.decode(text, type=WorkerSpec)
        return WorkerSpec._here

    def variable(self) -> dict[str, str]:
        """The environment variable in which a worker finds it."""
        return {WORKER_SPEC: msgspec.json.encode(self).decode()}


def restarts(env: Mapping[str, str] = os.environ) -> int:
    """How often this process's run was restarted before, by our agent or by torchrun's."""
    spec = WorkerSpec.here()
    return spec.generation if spec is not None else int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))


class ForkOrder(msgspec.Struct, frozen=True, array_like=True):
    """Fork a worker with this environment. The first descriptor of the message starts it; the others get these
    `numbers`, 1 and 2 among them.
    """

    env: tuple[tuple[bytes, bytes], ...]
    numbers: tuple[int, ...]
    blocked_signals: tuple[int, ...]


def as_bytes(env: Mapping[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    """An environment as the kernel has it: a value need not be UTF-8."""
    return tuple((os.fsencode(name), os.fsencode(value)) for name, value in env.items())


def at_import(env: Mapping[str, str]) -> dict[str, str]:
    """The part of a worker's environment that libraries may read while they are imported: the same for all ranks."""
    return {name: value for name, value in env.items() if name not in LATE and not name.startswith(LATE_PREFIXES)}


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The rank that comes."""

    rank: int


class Rendezvous(msgspec.Struct, frozen=True, tag=True):
    """Where node 0's agent listens, and the secret by which the nodes' agents know each other."""

    addresses: tuple[str, ...]
    port: int
    secret: str


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The exit code of a rank that ends now. The kernel reports it to the parent only, and a launcher may end the agent
    together with the rank.
    """

    code: int


Message = Hello | Rendezvous | Goodbye


def agent_address(env: Mapping[str, str], job: str) -> bytes:
    """The name of the socket: the same for all ranks of a job on this node, and different for every other job.

    `env` has torchrun's variables, `job` is a name that all ranks of the job have in common.
    """
    import hashlib  # each command imports this module, and hashlib takes milliseconds

    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", "SLURM_NODEID")
    words = [str(os.geteuid()), job, *(env.get(name, "") for name in names)]
    return b"\0paceline-watchover-" + hashlib.sha256("\0".join(words).encode()).hexdigest()[:32].encode()


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end, if it is of the same user; else 0."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return max(0, pid) if user == os.geteuid() else 0


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send it; raises OSError."""
    socket.send_fds(connection, [msgspec.json.encode(message)], descriptors)


def receive(connection: socket.socket) -> tuple[Message | None, list[int]]:
    """What has come, and the descriptors that came with it; None: the other end is gone, or sent something else.

    Raises:
        BlockingIOError: nothing has come.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        raise
    except OSError:
        return None, []
    try:
        return msgspec.json.decode(data, type=Message), descriptors
    except msgspec.MsgspecError:
        return None, descriptors


class Readable(Protocol):
    """What select takes."""

    def fileno(self) -> int:
        """Its descriptor."""
        ...


def hold_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that our starter has closed, as /dev/null.

    Otherwise the next socket would get their numbers, and text for people would arrive there, in the inbox as signals.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


@contextmanager
def signal_inbox(signals: Iterable[signal.Signals]) -> Generator[socket.socket]:
    """Inside, these signals no longer interrupt: each is a byte to be read from the socket, in order of arrival.

    Signals that the parent ignores stay ignored, or `nohup` would have no effect; except those that a shell ignores
    for `&`: a `kill` that sends them is meant. Main thread only.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    wanted = [s for s in signals if s in (signal.SIGCHLD, *TERMINALS) or signal.getsignal(s) is not signal.SIG_IGN]
    previous = {s: signal.signal(s, _only_wake) for s in wanted}
    previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)  # the launcher starts agents with them blocked
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def _only_wake(number: int, frame: object) -> None:
    """The byte in the inbox is all that is wanted of a signal."""


def read_inbox(inbox: socket.socket) -> list[signal.Signals]:
    """The stop signals that came since the last call; SIGCHLD only wakes."""
    try:
        return [signal.Signals(n) for n in inbox.recv(4096) if n in STOP_SIGNALS]
    except BlockingIOError:
        return []


def wait_readable(descriptors: Sequence[Readable | int], seconds: float) -> set[int]:
    """The numbers of those that can be read now, or within `seconds`."""
    poll = select.poll()  # not select: it knows no descriptor beyond 1023
    for one in descriptors:
        poll.register(one, select.POLLIN)
    return {number for number, _ in poll.poll(1000 * max(0.0, seconds))}


class Orders:
    """All orders to an agent so far; none is ever taken back, so a later look still finds them.

    `inbox` is from `signal_inbox`; `lifeline`: a launcher holds stdin open (not under Slurm or typed by hand),
    and counts as gone after `silence_seconds` of silence; 0: never.
    """

    def __init__(self, inbox: socket.socket, *, lifeline: bool = True, silence_seconds: float = 0.0) -> None:
        self.signals: list[signal.Signals] = []
        self.launcher_gone = False
        self._inbox, self._lifeline, self._silence_seconds = inbox, lifeline, silence_seconds
        self._heard_seconds = time.monotonic()
        self._line = b""

    @property
    def given(self) -> bool:
        """Whether there is any order: to stop, all of them."""
        return self.launcher_gone or bool(self.signals)

    def wait(self, seconds: float, also: Sequence[Readable] = ()) -> bool:
        """Return after `seconds`, or earlier when an order comes in, a child ends or one of `also` can be read.

        Returns:
            Whether an order has come in, or a child has ended.
        """
        lifeline = [LIFELINE] if self._lifeline and not self.launcher_gone else []  # an end stays readable for ever
        if lifeline and self._silence_seconds:
            seconds = min(seconds, max(0.1, self._heard_seconds + self._silence_seconds - time.monotonic()))
        before = len(self.signals), self.launcher_gone
        ready = wait_readable([self._inbox, *lifeline, *also], seconds)
        if woken := self._inbox.fileno() in ready:
            self.signals += read_inbox(self._inbox)
        if LIFELINE in ready:
            self._hear(os.read(LIFELINE, 4096))
        elif lifeline and self._silence_seconds and time.monotonic() > self._heard_seconds + self._silence_seconds:
            self.launcher_gone = True  # the network between us is cut: no end will ever be read
        return woken or before != (len(self.signals), self.launcher_gone)

    def _hear(self, data: bytes) -> None:
        self._heard_seconds = time.monotonic()
        self.launcher_gone = not data
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[-100:]  # no order is longer
        self.signals += [STOP_ORDERS[line] for line in lines if line in STOP_ORDERS]
