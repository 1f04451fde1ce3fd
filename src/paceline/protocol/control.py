"""The control messages between launcher, agent and ranks, and the environment variables of paceline.

An agent starts a rank itself, or requests it from the preloader, a process that has imported all modules and forks:

    agent                                   preloader (rank/preload.py)
    starts it, with the command of a rank   imports the modules of every rank
                                            -> READY, or the reason why it cannot fork ranks
    ForkRequest, with descriptors           -> the rank's pid, when it is the agent's child
    a byte, once it has recorded the rank   the rank begins; without that byte it ends

A rank that another launcher started (`paceline watchover`) attaches to the agent of its node:

    rank -> agent    Hello, with two descriptors: its status page, and its failure record
    agent -> rank    AgentAddress, on node 0 of several, to local rank 0, which publishes it to the other nodes' ranks
    rank -> agent    the same AgentAddress, on the other nodes
    rank -> agent    RankExit, its last message; it waits until the agent closes the connection

A node may have a run folder that node 0 does not see. Its ranks then ask their agent to copy files (agent/files.py):

    rank -> agent    TransferRequest
    agent -> rank    TransferReply without a result, every second while data moves; then one with the result

They connect through an abstract Unix socket, which has no file. Its name is not secret, so each end asks the kernel for
the user of the other end. Each message is one packet. No part of a message is executed or unpickled. `StopSignals`
collects the requests of a launcher, a scheduler or a user to an agent: stop signals, and the lifeline.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterable, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import msgspec

RANK_PACKAGE = "paceline.rank."  # the package of the modules that run in a rank
BOOTSTRAP = f"{RANK_PACKAGE}bootstrap"  # runs any script as a worker of our agent
CHECK_OPTION = "--check"  # an option of the bootstrap, before the script: it also records facts of the run
WORKER_SPEC = "PACELINE_WORKER"
FIRST_PORT, PORTS = 20000, 10000  # below the ports that the kernel uses for outgoing connections (Linux: from 32768)
READY = b"ready"
MAX_FORK_REQUEST_BYTES = 1 << 20
MAX_DESCRIPTORS = 253  # the kernel's limit for one message
LATE_PREFIXES = ("PACELINE_", "TORCHELASTIC_", "ROLE_", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LATE_VARIABLES = (  # variables that differ between ranks or starts, and are read only when a process group is created
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
MAX_MESSAGE_BYTES = 1 << 16
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT)  # a shell without job control starts `&` commands with these ignored
LIFELINE_DESCRIPTOR = 0  # stdin: the launcher holds it open, and writes after the plan one line per heartbeat or order
GRACE_SECONDS = (
    3.0  # between a stop request to a worker and its kill; the kill of all processes after it still ends within 5 s
)
LIFELINE_GRACE_SECONDS = min(2.0, GRACE_SECONDS)  # the same after the launcher has ended
REMOTE_GRACE_SECONDS = 6.0  # the same after a launcher has ended at the other end of ssh: all ends within 10 s
STOP_ORDERS = {f"stop {number.name}".encode(): number for number in STOP_SIGNALS}  # signals cannot cross a network
RUN_ID = "PACELINE_RUN_ID"
SHARED_MEMORY = "PACELINE_SHARED_MEMORY"
PRELOAD = "PACELINE_PRELOAD"
AGENT_MARK = "PACELINE_AGENT_MARK"
# names (of variables, for example) whose values paceline never prints
SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|COOKIE", re.IGNORECASE)


class WorkerSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The specification of a worker. Its agent passes it in one environment variable, with torchrun's variables.

    The worker removes the variable from its environment, because its children are not workers of the agent: they do not
    end with the agent and do not report to it. Descriptors are numbers of inherited open files; -1: none.
    """

    _here: ClassVar[WorkerSpec | None] = None

    agent_pid: int
    attempt_dir: str = ""
    generation: int = 0  # the number of restarts before
    record: int = -1  # memory for the failure record of the worker
    page: int = -1  # memory for the status page of the worker: see status_page.py
    store: int = -1  # the rendezvous store: memory with a FileStore in it, or rank 0's listening socket
    snapshots: tuple[tuple[int, int], ...] = ()  # two memory files for each rank of the node, kept over restarts
    temporary: str = ""  # a folder that is removed when the agent ends
    guarded: bool = True  # False: no hang guard, --hang-timeout off
    speeds: tuple[float, ...] = ()  # the relative speed of each rank: --balance. Empty: equal
    balance: str = ""  # the value of --balance, for errors
    shares_gradients: bool = False  # DDP reduces gradients through shared memory: --collectives shared
    devices: tuple[int, ...] = ()  # index of the device of each local rank; empty: the local rank
    fixed_nodes: int = 0  # JobSpec.fixed_nodes, for errors
    min_nodes: int = 1  # JobSpec.min_nodes, for a warning
    preload: int = -1  # only for the preloader: the socket on which the agent requests workers
    transfers: str = ""  # name of the agent's socket for a `TransferRequest`; empty: the node sees node 0's run folder
    keeps_copy: bool = False  # this node keeps a copy of each checkpoint, because node 0 does not see its run folder

    @classmethod
    def from_environment(cls, env: MutableMapping[str, str] = os.environ) -> WorkerSpec | None:
        if (text := env.pop(WORKER_SPEC, None)) is not None:  # at each call: a forked worker gets it after its fork
            WorkerSpec._here = msgspec.json.decode(text, type=WorkerSpec)
        return WorkerSpec._here

    def to_environment(self) -> dict[str, str]:
        return {WORKER_SPEC: msgspec.json.encode(self).decode()}


def restart_count(env: Mapping[str, str] = os.environ) -> int:
    spec = WorkerSpec.from_environment()
    return spec.generation if spec is not None else int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))


class ForkRequest(msgspec.Struct, frozen=True, array_like=True):
    env: tuple[tuple[bytes, bytes], ...]
    numbers: tuple[int, ...]
    blocked_signals: tuple[int, ...]


def encode_environment(env: Mapping[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((os.fsencode(name), os.fsencode(value)) for name, value in env.items())


def select_import_env(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in env.items() if name not in LATE_VARIABLES and not name.startswith(LATE_PREFIXES)
    }


class Hello(msgspec.Struct, frozen=True, tag=True):
    rank: int


class AgentAddress(msgspec.Struct, frozen=True, tag=True):
    """The addresses and the port of node 0's agent, and the secret with which the agents authenticate each other."""

    addresses: tuple[str, ...]
    port: int
    secret: str


class RankExit(msgspec.Struct, frozen=True, tag=True):
    """The last message of a rank: its exit code.

    The kernel reports the exit code only to the parent, and a launcher may end the agent together with the rank.
    """

    code: int


class TransferRequest(msgspec.Struct, frozen=True, tag=True):
    """Send the file at this path to node 0, or fetch the checkpoint in this folder from there."""

    kind: Literal["send", "fetch"]
    path: str


class TransferReply(msgspec.Struct, frozen=True, tag=True):
    failure: str | None = None  # empty: the transfer is complete; None: it continues


Message = Hello | AgentAddress | RankExit | TransferRequest | TransferReply


def agent_address(env: Mapping[str, str], job: str) -> bytes:
    """The name of the agent's socket: equal for all ranks of a job on this node, different for every other `job`."""
    import hashlib  # takes milliseconds, and every command imports this module

    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", "SLURM_NODEID")
    parts = [str(os.geteuid()), job, *(env.get(name, "") for name in names)]
    return b"\0paceline-watchover-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32].encode()


def peer_pid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return max(0, pid) if uid == os.geteuid() else 0


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    socket.send_fds(connection, [msgspec.json.encode(message)], descriptors)


def receive(connection: socket.socket) -> tuple[Message | None, list[int]]:
    """A message and its descriptors; None if the other end has closed or sent invalid data. Raises BlockingIOError."""
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


def has_separate_folder(run_dir: Path) -> bool:
    """Whether this node has another `run_dir` than node 0, because its file system is separate: its agent copies."""
    spec = WorkerSpec.from_environment()
    if spec is None or not spec.transfers:
        return False
    return Path(spec.attempt_dir).parent.resolve() == run_dir.resolve()  # either may contain a link


def request_transfer(
    kind: Literal["send", "fetch"], path: Path, on_progress: Callable[[], object] = lambda: None
) -> str:
    """Have the agent of this node copy a file or a checkpoint; see `TransferRequest`. Returns why it failed, or "".

    Does nothing on a node that sees the run folder of node 0.
    """
    spec = WorkerSpec.from_environment()
    if spec is None or not any(map(has_separate_folder, path.parents)):
        return ""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(b"\0" + spec.transfers.encode())
            if not peer_pid(connection):
                return "another user listens at the socket of the agent"
            send(connection, TransferRequest(kind, str(path)))
        except OSError as error:
            return f"the agent of this node does not answer: {error.strerror}"
        while True:
            reply, _ = receive(connection)
            if not isinstance(reply, TransferReply):
                return "the agent of this node has ended"
            if reply.failure is not None:
                return reply.failure
            on_progress()


class SupportsFileno(Protocol):
    def fileno(self) -> int: ...


def hold_standard_descriptors() -> None:
    """Open the descriptors 0, 1 and 2 as /dev/null if the parent process has closed them.

    Otherwise the next socket would get such a number. Printed text would arrive there, and the wakeup socket would read
    it as signals.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


@contextmanager
def signal_wakeup(signals: Iterable[signal.Signals]) -> Generator[socket.socket]:
    """Inside the context, these signals do not interrupt. Each writes a byte to the socket, in order of arrival.

    Signals that the parent ignores stay ignored, so that `nohup` works. Exceptions are the signals that a shell ignores
    for `&` commands: a `kill` that sends these is intended. Call it in the main thread only.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    wanted = [
        s for s in signals if s in (signal.SIGCHLD, *TERMINAL_SIGNALS) or signal.getsignal(s) is not signal.SIG_IGN
    ]
    previous_handlers = {s: signal.signal(s, lambda *_: None) for s in wanted}  # the byte is sufficient
    previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)  # the launcher starts agents with them blocked
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def read_stop_signals(wakeup: socket.socket) -> list[signal.Signals]:
    try:
        return [signal.Signals(n) for n in wakeup.recv(4096) if n in STOP_SIGNALS]
    except BlockingIOError:
        return []


def poll_readable(descriptors: Sequence[SupportsFileno | int], seconds: float) -> set[int]:
    poll = select.poll()  # select.select supports no descriptor above 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {number for number, _ in poll.poll(1000 * max(0.0, seconds))}


class StopSignals:
    """All orders to an agent so far. Orders are never withdrawn.

    `wakeup` is from `signal_wakeup`. With `lifeline`, a launcher holds stdin open (not under Slurm, and not if a user
    starts the agent). The launcher counts as ended after `silence_seconds` without data; 0: never.
    """

    def __init__(self, wakeup: socket.socket, *, lifeline: bool = True, silence_seconds: float = 0.0) -> None:
        self.signals: list[signal.Signals] = []
        self.launcher_gone = False
        self._wakeup, self._lifeline, self._silence_seconds = wakeup, lifeline, silence_seconds
        self._heard_seconds = time.monotonic()
        self._line = b""

    @property
    def has_order(self) -> bool:
        return self.launcher_gone or bool(self.signals)

    def wait(self, seconds: float, also: Sequence[SupportsFileno] = ()) -> bool:
        """Wait up to `seconds` for an order, the end of a child or `also`. Return whether one of the first two came."""
        # end of file stays readable forever
        lifeline = [LIFELINE_DESCRIPTOR] if self._lifeline and not self.launcher_gone else []
        if lifeline and self._silence_seconds:
            seconds = min(seconds, max(0.1, self._heard_seconds + self._silence_seconds - time.monotonic()))
        before = len(self.signals), self.launcher_gone
        ready = poll_readable([self._wakeup, *lifeline, *also], seconds)
        if woken := self._wakeup.fileno() in ready:
            self.signals += read_stop_signals(self._wakeup)
        if LIFELINE_DESCRIPTOR in ready:
            self._read_orders(os.read(LIFELINE_DESCRIPTOR, 4096))
        elif lifeline and self._silence_seconds and time.monotonic() > self._heard_seconds + self._silence_seconds:
            self.launcher_gone = True  # the network connection is broken, so no end of file will arrive
        return woken or before != (len(self.signals), self.launcher_gone)

    def _read_orders(self, data: bytes) -> None:
        self._heard_seconds = time.monotonic()
        self.launcher_gone = not data
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[-100:]  # no order is longer
        self.signals += [STOP_ORDERS[line] for line in lines if line in STOP_ORDERS]
