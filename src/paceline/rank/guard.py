"""The part of the hang guard in a rank: it reports the state of the rank to the agent, and unblocks the rank.

Each process has one guard, which the first call makes. A process has one agent and one status page, and torch's
functions can be wrapped only once. With `--hang-timeout off` the guard only counts steps.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, ClassVar, Self

import msgspec

from paceline.errors import ExitCode, StallError, UsageError
from paceline.host.procfs import GUARD_THREAD, open_descriptors, proc_net_address, read_tcp_table
from paceline.host.tcp import is_loopback, set_tcp_md5_key
from paceline.protocol.control import WorkerSpec
from paceline.protocol.evidence import Phase, WorkerAnswer, is_lost_peer_error
from paceline.protocol.status_page import RELEASED, SIGNAL_SAFE, STACK_SIGNAL, WATCHED, StatusPage, make_status_page
from paceline.rank import flight_recorder
from paceline.rank.collective_recorder import C10D_MODULE, CollectiveOrderRecorder, CollectiveRecorder, GroupRecord
from paceline.rank.imports import hide_from_warnings, when_imported
from paceline.runs.owners import user_name

RELEASE_GRACE_SECONDS = 1.0  # a rank that is unblocked earlier closes its connections to this rank
WAKE_SECONDS = 0.25
GROUP_CONSTRUCTOR = "_new_process_group_helper"  # init_process_group, new_group and split_group all call it
LOOPBACK = "127.0.0.1"
ConnectionEnd = tuple[str, str, bool]  # our address and port, those of the other end, whether we accepted it


class HangGuard:
    max_steps = float("inf")  # a session ends its training after this number of steps; the script continues
    _instance: ClassVar[HangGuard | None] = None

    def __init__(self, page: StatusPage | None, *, on: bool) -> None:
        """`page` is the agent's status page; None in a process without an agent."""
        self.on = on
        self._has_agent = page is not None
        self.record = -1  # memory for the failure record, if the agent did not start this process
        self.leave: Callable[[int], None] = lambda code: None  # reports the exit code to such an agent
        self.page = page or StatusPage(make_status_page(0))
        self._warned = False
        self.ledger = CollectiveRecorder(self.page, self.warn_once)
        self.connections = ProcessGroupSockets()
        self.before_abort: Callable[[], object] = lambda: None
        """Called in another thread before collectives are aborted."""
        self._watcher: StatusThread | None = None
        self._detach: Callable[[], None] | None = None  # removes the probes from an unmodified script
        if not on:
            self.page.share_only_steps()
            self.ledger.active = False

    @classmethod
    def of_process(cls) -> HangGuard:
        if HangGuard._instance is None:
            spec = WorkerSpec.from_environment()
            page = None if spec is None else StatusPage.from_descriptor(spec.page)
            HangGuard._instance = guard = cls(page, on=spec is None or spec.guarded)
            os.register_at_fork(after_in_child=guard._disable_after_fork)
        return HangGuard._instance

    @classmethod
    def create_attached(cls, page: int, record: int) -> HangGuard:
        """Make the guard for an agent that did not start this process. The agent reads the page and the record."""
        HangGuard._instance = guard = cls(StatusPage(page), on=True)
        guard.record = record
        os.register_at_fork(after_in_child=guard._disable_after_fork)
        return guard

    def start(self) -> Self:
        """Start the watcher if there is an agent. Never raises."""
        if not (self.on and self._has_agent) or self._watcher is not None:
            return self
        try:
            os.set_inheritable(self.page.descriptor, False)  # programs that the script starts have no status page
            self._watcher = StatusThread(self)
            self._watcher.start()
            atexit.register(self._watcher.stop)
        except Exception as error:
            self.warn_once(error)
        return self

    def watch_torch(self) -> Self:
        """Record torch.distributed's calls from now on, or from its import. Never raises."""
        try:
            if C10D_MODULE in sys.modules:
                self._wrap_torch(late=True)
            else:
                when_imported(C10D_MODULE, self._wrap_torch)
        except Exception as error:
            self.warn_once(error)
        return self

    def attach_probes(
        self,
        detach: Callable[[], None],
        marker: CollectiveOrderRecorder | None,
        failed: Callable[[BaseException], None] | None,
    ) -> None:
        """Let probes observe the script until `detach_probes`. `failed` receives the errors of its collectives."""
        self._detach, self.ledger.marker, self.ledger.failed = detach, marker, failed
        self.page.put("script", 1)

    def detach_probes(self) -> None:
        """Remove the probes. A session or a training of paceline calls this, because it reports and checks itself."""
        if self._detach is not None:
            self._detach()
            self.ledger.marker = self.ledger.failed = None
        self.page.put("script", 0)

    @contextmanager
    def enter_phase(self, phase: Phase) -> Generator[None]:
        previous = self.page.enter(phase)
        try:
            yield
        finally:
            self.page.enter(previous)

    def release_reason(self) -> str:
        """The agent's reason as JSON, if it has unblocked this rank; else empty."""
        return (self.page.agent_message().decode(errors="replace") or "{}") if self.page.get("released") else ""

    def check_not_released(self) -> None:
        """Raise StallError if the agent has unblocked this rank: results of collectives since then are invalid.

        NCCL returns from an aborted collective without an error. Call this after the host has read a result, and before
        it uses, applies or saves it. The agent sets the flag before this rank aborts.
        """
        if self.page.words[RELEASED]:
            raise self.stall_error(RuntimeError()) or StallError("the hang guard has ended this wait")

    def stall_error(self, error: BaseException) -> StallError | None:
        """The error to raise in place of `error`, if the guard has aborted the collective; else None.

        If `error` reports a lost connection, it waits up to a second for the agent, which unblocks ranks one by one.
        """
        deadline = time.monotonic() + RELEASE_GRACE_SECONDS
        may_be_released = self._has_agent and is_lost_peer_error(error)
        while may_be_released and self.on and not self.release_reason() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not (text := self.release_reason()):
            return None
        reason = msgspec.json.decode(text, type=dict[str, Any])
        message, code = reason.get("page"), reason.get("exit_code")  # 137, for example, if a rank was killed meanwhile
        message = message or "another rank made no progress: the hang guard has ended this wait"
        return StallError(message, ExitCode(code) if code in [*ExitCode] else ExitCode.STALLED)

    def _wrap_torch(self, *, late: bool = False) -> None:
        module = sys.modules[C10D_MODULE]
        others = [sys.modules["torch.distributed"]] if late else []
        if self.on:
            self.ledger.install(module, *others, late=late)
        self.connections.install(module)

    def _disable_after_fork(self) -> None:
        # a forked process loads data or belongs to the script: it must not report as the rank
        self.page.share_only_loader_items()
        self.ledger.active = False
        self.on = self._has_agent = False
        self.record, self.leave = -1, lambda code: None

    def warn_once(self, error: BaseException) -> None:
        if not self._warned:
            self._warned = True
            print(f"paceline: internal error in the hang guard, which continues: {error!r}", file=sys.stderr)


class StatusThread:
    """A thread that writes the status page four times a second, because the main thread may be stuck.

    It shows that the interpreter runs, counts the collectives that torch has called from C++, and answers the agent's
    questions for stacks and collectives. It closes the connections of a collective that cannot complete. It holds no
    lock that the main thread needs, imports nothing, and handles all its errors.
    """

    def __init__(self, guard: HangGuard) -> None:
        self._guard, self._page, self._ledger, self._connections = guard, guard.page, guard.ledger, guard.connections
        self._warn_once, self._native = guard.warn_once, StackSignalHandler(guard.page)
        self._main = threading.main_thread().ident or 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=GUARD_THREAD, daemon=True)
        self._last, self._still, self._answered, self._aborted = (0, 0), 0, 0, False

    def start(self) -> None:
        self._page.put("ready", self._native.readiness())
        self._thread.start()

    def stop(self) -> None:
        """Stop before the process ends, so that the thread does not use torch during its teardown."""
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        with suppress(OSError):  # by this name the agent recognizes a thread that wakes no other thread
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(GUARD_THREAD)
        while not self._stop.wait(WAKE_SECONDS):
            for part in (self._write_heartbeat, self._answer_agent, self._unblock_if_released):
                try:
                    part()
                except Exception as error:
                    self._warn_once(error)

    def _write_heartbeat(self) -> None:
        page = self._page
        page.put("beat_ns", time.monotonic_ns())
        page.put("ready", self._native.readiness())
        groups = [*self._ledger.groups.values()]
        for group in groups:
            group.end_completed_calls(page)
        enqueued = [group for group in groups if group.enqueued_calls]
        if (
            enqueued
            and not flight_recorder.graph_capture.is_set()
            and (self._still > 0 or not flight_recorder.has_op_in_flight())
        ):
            pending = flight_recorder.pending_op_ids(self._groups()) if flight_recorder.has_op_in_flight() else ()
            for group in enqueued:
                group.end_enqueued(pending, page)
        counts = (sum(flight_recorder.sequence_numbers().values()), page.get("ops"))
        self._still = self._still + 1 if counts == self._last else 0
        self._last = counts
        page.put("enqueued", counts[0])
        page.put("waiting", self._ledger.is_waiting or (self._still > 0 and flight_recorder.has_op_in_flight()))

    def _answer_agent(self) -> None:
        question = self._page.get("asked")
        if question <= self._answered:
            return
        self._answered = question
        groups = self._groups()
        stacks = flight_recorder.collect_thread_stacks(self._main)
        answer = WorkerAnswer(
            ops=tuple(flight_recorder.merge_recent_ops(self._page.recent_ops(), groups, stacks[0] if stacks else None)),
            groups={group.name: group.members for group in groups.values()} | flight_recorder.ranks_by_group(),
            titles=flight_recorder.group_descriptions(),
            stacks=stacks,
        )
        self._page.answer(question, msgspec.json.encode(answer))

    def _groups(self) -> dict[str, GroupRecord]:
        return {group.name: group for group in [*self._ledger.groups.values()] if group.group_ref() is not None}

    def _unblock_if_released(self) -> None:
        if not self._page.get("released"):
            return
        self._guard.before_abort()
        if not self._aborted and (module := flight_recorder.loaded_c10d_module()) is not None:
            self._aborted = True
            threading.Thread(target=abort_nccl, args=(module,), name="paceline-abort", daemon=True).start()
        self._connections.shut_down()


class StackSignalHandler:
    """Python's faulthandler: on SIGNAL it appends the stacks to the status page, without the interpreter lock.

    The agent thus gets the Python line that called an endless regular expression or a C extension that never returns.
    """

    def __init__(self, page: StatusPage) -> None:
        path = f"/proc/self/fd/{page.descriptor}"
        self._file: BinaryIO | None = open(path, "ab", buffering=0)  # noqa: PTH123, SIM115 - as long as the process
        self._inode = os.fstat(self._file.fileno()).st_ino
        # Only the thread that receives the signal, usually the main one. Without the lock, stacks of threads that run,
        # start or end cannot be read safely (measured: the process crashed occasionally).
        faulthandler.register(STACK_SIGNAL, file=self._file, all_threads=False, chain=False)

    def readiness(self) -> int:
        """SIGNAL_SAFE while the file is the status page; a program that closes all descriptors may replace it."""
        if self._file is None:
            return WATCHED
        try:
            if os.fstat(self._file.fileno()).st_ino == self._inode:
                return SIGNAL_SAFE
        except OSError:
            pass
        faulthandler.unregister(STACK_SIGNAL)
        self._file = None
        return WATCHED


class ProcessGroupSockets:
    """The sockets of process groups. Closing them unblocks a rank that waits in a collective.

    Gloo cannot abort (torch's `abort` unblocks nothing), but its sockets belong to this process. Shutting them down
    makes the blocked call raise a RuntimeError within milliseconds. NCCL's groups can be aborted. Their waiting calls
    return *without an error*, with undefined data in the buffers (`HangGuard.check_not_released` detects this).

    Gloo's sockets are those that torch opened while it made the process group: gloo connects all pairs then, and the
    store has connected before. Connections of the store and of the user are therefore never closed, except one that a
    thread of the user opens at the same moment. Inodes identify the sockets, because a descriptor may be reused.
    With TORCH_GLOO_LAZY_INIT the connections open later and are unknown here. Such a rank stays blocked until it is
    stopped.

    Gloo listens for its peers on ports that every user of the machine can reach. Once a group is made, all its pairs
    are connected, and this class closes the ports to new connections. Before that, for less than a second, a foreign
    process may connect first: gloo accepts any process that sends a small number. On one machine the kernel shows the
    user at the other end. A group with a foreign user in it is not used.
    """

    def __init__(self) -> None:
        self.inodes: set[str] = set()
        self.ends: list[ConnectionEnd] = []
        """The ends of the connections to other hosts that the last group has opened."""
        self._tolerated: list[list[str]] | None = None
        self._installed = False

    def install(self, distributed: ModuleType) -> None:
        """Record the sockets of each new process group, and close its ports. Further calls do nothing."""
        if self._installed:
            return
        self._installed, make = True, getattr(distributed, GROUP_CONSTRUCTOR)

        @hide_from_warnings
        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            sockets_before = list_open_sockets()
            try:
                group = make(*args, **kwargs)
            finally:
                new_sockets = {inode: fd for inode, fd in list_open_sockets().items() if inode not in sockets_before}
            # NCCL needs its ports open: ranks connect at their first collective
            if _is_nccl(distributed, group[0]) and "gloo" not in str(distributed._world.pg_backend_config[group[0]]):
                return group
            self.inodes |= new_sockets.keys()
            self.ends = non_loopback_connections(new_sockets.values())
            if os.environ.get("TORCH_GLOO_LAZY_INIT", "").upper() in ("", "0", "OFF", "FALSE", "N", "NO"):
                if not block_new_connections(new_sockets.values()) and os.environ.get("LOCAL_RANK", "0") == "0":
                    print(
                        "paceline: this system cannot close the ports of process groups. Other users of this machine "
                        "can connect to them, which wastes memory and time, but they cannot act as a rank",
                        file=sys.stderr,
                    )
                if users := foreign_peer_users(new_sockets.values()):
                    if self._tolerated is None:
                        raise other_users_error(users)
                    self._tolerated.append(users)
            return group

        setattr(distributed, GROUP_CONSTRUCTOR, made)

    @contextmanager
    def tolerate_foreign_users(self) -> Generator[list[list[str]]]:
        """Inside the context, a group with foreign users is no error. The list collects the users for a retry."""
        self._tolerated = []
        try:
            yield self._tolerated
        finally:
            self._tolerated = None

    def shut_down(self) -> None:
        descriptors = [descriptor for inode, descriptor in list_open_sockets().items() if inode in self.inodes]
        for sock in _tcp_sockets(descriptors):
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                with suppress(OSError):  # closed meanwhile
                    sock.shutdown(socket.SHUT_RDWR)


def non_loopback_connections(descriptors: Collection[int]) -> list[ConnectionEnd]:
    listening: set[int] = set()
    pairs: list[tuple[tuple[str, int], tuple[str, int]]] = []
    for sock in _tcp_sockets(descriptors):
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listening.add(sock.getsockname()[1])
        else:
            with suppress(OSError):  # closed by the other side
                pairs.append((sock.getsockname()[:2], sock.getpeername()[:2]))
    return [
        ("{} {}".format(*own), "{} {}".format(*peer), own[1] in listening)
        for own, peer in pairs
        if not is_loopback(own[0])
    ]


def list_open_sockets() -> dict[str, int]:
    """All sockets of this process: inode -> a descriptor of it."""
    return {target: descriptor for descriptor, target in open_descriptors().items() if target.startswith("socket:")}


def abort_nccl(distributed: ModuleType) -> None:
    """Abort all NCCL groups together, because aborting one alone would wait for the others (pytorch 119797)."""
    names: dict[Any, str] = {**distributed._world.pg_names}
    groups = sorted((group for group in names if _is_nccl(distributed, group)), key=lambda group: names[group])
    if not groups:
        return
    backend = groups[0]._get_backend(sys.modules["torch"].device("cuda"))
    backend._group_start()
    try:
        for group in reversed(groups):
            group.abort()
    finally:
        backend._group_end()


def _is_nccl(distributed: ModuleType, group: Any) -> bool:
    return "nccl" in str(distributed._world.pg_backend_config.get(group))


def block_new_connections(descriptors: Collection[int]) -> bool:
    """Have the kernel drop new connections to our listening ports. False if it does not support this."""
    return all(
        set_tcp_md5_key(sock, os.urandom(16))  # no process knows this key
        for sock in _tcp_sockets(descriptors)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def foreign_peer_users(descriptors: Collection[int]) -> list[str]:
    ends: dict[tuple[str, str], None] = {}
    for sock in _tcp_sockets(descriptors):
        with suppress(OSError):  # it only listens
            (address, port), (peer_address, peer_port) = sock.getsockname()[:2], sock.getpeername()[:2]
            if address == peer_address == LOOPBACK:
                ends[proc_net_address(peer_address, peer_port), proc_net_address(address, port)] = None
    # (local end, remote end) -> user, of all IPv4 connections in this network namespace
    users = {(row[1], row[2]): int(row[7]) for row in read_tcp_table("tcp")} if ends else {}
    return [user_name(user) for user in sorted({users[end] for end in ends if end in users} - {os.geteuid()})]


def other_users_error(users: list[str]) -> UsageError:
    return UsageError(code="stranger-in-group", users=users, host=os.uname().nodename)


def _tcp_sockets(descriptors: Collection[int]) -> Iterator[socket.socket]:
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:  # closing this does not close gloo's
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock
