"""The workers of one node in one generation: start, observe, stop and kill them.

A worker starts with an environment, a log, and inherited descriptors.
"""

import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from paceline.errors import UsageError
from paceline.guard.collect import EvidenceCollection, IdleTimer
from paceline.host.cgroup import oom_kills
from paceline.host.cleanup import Roster, RosterWorker, agent_mark, kill_sessions, roster_path, start_ticks
from paceline.host.node_utilization import NodeUtilizationLogger
from paceline.launch.agent.channel import Order, StopOrder, StopStepOrder, UnblockOrder, port_taken_error
from paceline.launch.agent.preload import ForkedProcess, Preloader
from paceline.launch.output import start_output_relay
from paceline.protocol.control import AGENT_MARK, RANK_PACKAGE, RUN_ID, SHARED_MEMORY, WorkerSpec
from paceline.protocol.evidence import SUCCESS_EXIT_CODES, Failure, RankSample
from paceline.protocol.job import NodePlan
from paceline.protocol.marks import read_tensor_and_call_names
from paceline.protocol.status_page import (
    handles_signal,
    make_status_page,
    read_counters,
    release_from_collective,
    set_counter,
)
from paceline.runs import writing
from paceline.runs.attempt import LogTimesWriter
from paceline.runs.folder import create_user_compile_cache

if TYPE_CHECKING:
    from paceline.launch.agent.store_proxy import StoreProxy

VARIABLE_PREFIX = "PACELINE_"
USER_VARIABLES = (SHARED_MEMORY,)  # variables with our prefix that the user sets for a run


@dataclass(frozen=True)
class StoreEndpoint:
    """The rendezvous store of a generation.

    On one host, the store is in `memory_fd`: an anonymous file that the ranks inherit, and that no other user can
    open. On several hosts, it is at a port, and the ranks reach it through a `proxy`: see store_proxy.py. Rank 0
    inherits the socket bound and listening, since another process could take a port that is closed in between.

    A script opens its store itself, at a port that is open to all. The agent only binds this port. So the kernel does
    not assign it to another process that asks for any free port, and the script can still bind it with SO_REUSEADDR.
    """

    port: int
    address: str
    listening_socket: socket.socket | None = None
    memory_fd: int = -1
    proxy: "StoreProxy | None" = None

    @classmethod
    def make(cls, plan: NodePlan) -> Self:
        if plan.nodes > 1 and not plan.plain_store:
            from paceline.launch.agent import store_proxy  # it imports asyncio, which takes time

            if plan.node:
                port, secret = plan.node0_ports[0], bytes.fromhex(plan.secret)
                store, proxy = None, store_proxy.remote_store_proxy(plan.master_addr, port, secret)
            else:
                store, proxy = store_proxy.bind_store_and_proxy(plan.ranks.master_port)
            return cls(proxy.port, store_proxy.LOOPBACK, store, proxy=proxy)
        if plan.node:
            return cls(plan.ranks.master_port, plan.master_addr)
        store = _bound(plan)
        memory_fd = os.memfd_create("paceline-store") if plan.nodes == 1 else -1
        return cls(store.getsockname()[1], plan.master_addr, store, memory_fd)

    def inherited_fd(self, rank: int, *, plain: bool) -> int:
        """The descriptor of the store that this rank inherits; -1 if the rank connects instead."""
        if self.memory_fd >= 0:
            return self.memory_fd
        return self.listening_socket.fileno() if rank == 0 and self.listening_socket is not None and not plain else -1

    def close(self) -> None:
        """Close the agent's descriptors. With its socket open, connections to an ended rank 0 would not be refused."""
        if self.listening_socket is not None:
            self.listening_socket.close()
        if self.memory_fd >= 0:
            os.close(self.memory_fd)


def _bound(plan: NodePlan) -> socket.socket:
    port = plan.ranks.master_port
    store = socket.socket(socket.AF_INET6 if ":" in plan.master_addr else socket.AF_INET)
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # despite closing connections of the last run
    try:
        store.bind(("" if plan.plain_store else plan.master_addr, port))
    except OSError as error:
        store.close()
        raise port_taken_error(f"port {port} on {plan.master_addr}", port, error) from error
    return store


@dataclass(frozen=True)
class InheritedResources:
    """They last as long as the agent. Workers of every generation inherit the descriptors, with the same numbers."""

    snapshot_fds: tuple[tuple[int, int], ...] = ()  # two memory files for each local rank, which writes and reads them
    keep_open: tuple[int, ...] = ()  # e.g. a lock that must last until the last worker has ended
    cleanup_fd: int = -1  # not inherited: descriptor on which the cleanup process reads the attempt's folder
    temporary_folder: str = ""  # a folder that is deleted when the agent ends, for any reason
    preloader: Preloader | None = None  # not inherited: the process from which workers are forked
    transfers: str = ""  # see `WorkerSpec`
    keeps_copy: bool = False

    @property
    def descriptors(self) -> list[int]:
        return [*(descriptor for pair in self.snapshot_fds for descriptor in pair), *self.keep_open]


def create_memory_snapshot_files(nproc: int) -> tuple[tuple[int, int], ...]:
    """Two empty memory files for each rank of the first generation: one stays complete while the other is written."""
    return tuple(
        (os.memfd_create(f"paceline-snapshot-{rank}-0"), os.memfd_create(f"paceline-snapshot-{rank}-1"))
        for rank in range(nproc)
    )


class ProcessHandle(Protocol):
    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float, /) -> int | None:
        """Wait for the process to end. On a timeout, return None or raise subprocess.TimeoutExpired."""

    def send_signal(self, number: int, /) -> None: ...


@dataclass(frozen=True)
class Worker:
    member: RosterWorker
    process: ProcessHandle
    log: Path
    log_start: int  # offset of its first byte in the log; earlier generations wrote the bytes before it
    relays: Sequence[threading.Thread]
    failure_record_fd: int  # memory file with its failure record
    status_page_fd: int  # memory file with its status page

    @property
    def rank(self) -> int:
        return self.member.rank

    def log_tail(self, size_bytes: int, *, wait_seconds: float) -> str:
        """The end of the log. Waits `wait_seconds` for the last output, which may still be in the pipe."""
        for thread in self.relays:
            thread.join(wait_seconds)
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log_start, os.fstat(file.fileno()).st_size - size_bytes))
                return file.read().decode(errors="replace")
        except OSError:
            return ""


def worker_environment(plan: NodePlan, local_rank: int, port: int, generation: int = 0) -> dict[str, str]:
    ranks, rank = plan.ranks, plan.ranks.first + local_rank
    suffix = f"-{generation}" if generation else ""
    ours = {name for name in os.environ if name.startswith(VARIABLE_PREFIX) and name not in USER_VARIABLES}
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(plan.nproc),
        "GROUP_RANK": str(ranks.group_rank),
        "GROUP_WORLD_SIZE": str(ranks.groups),
        "ROLE_NAME": plan.role,
        "ROLE_RANK": str(rank),  # all ranks have one role
        "ROLE_WORLD_SIZE": str(ranks.world_size),
        "TORCHELASTIC_RUN_ID": plan.rdzv_id or plan.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(ranks.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 opens a store
        # torch's `record` decorator writes an exception to this file
        "TORCHELASTIC_ERROR_FILE": str(Path(plan.attempt_dir) / f"torchelastic-error-{rank}{suffix}.json"),
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(plan.threads),
        RUN_ID: plan.run_id,
    }
    # Otherwise a killed worker loses buffered lines, and a crashed one its Python stack. The user's settings stay
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.setdefault("PYTHONFAULTHANDLER", "1")
    env.setdefault("TORCH_FR_BUFFER_SIZE", "256")  # collectives in torch's flight recorder: dumping 2000 takes 20 ms
    if not plan.hang_timeout.off:  # otherwise torch's watchdog ends a rank before it has saved after the guard's abort
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    env.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")  # otherwise two groups on one GPU can deadlock
    env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, at the first matrix product
    if "TORCHINDUCTOR_CACHE_DIR" not in env:  # torch's default, in /tmp, is lost with the node or the job
        with suppress(UsageError):  # there is no private folder, and a script may compile nothing
            env["TORCHINDUCTOR_CACHE_DIR"] = str(cache := create_user_compile_cache())
            env.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    if plan.master_addr == "127.0.0.1":
        # One host: gradients stay on the loopback, even if the name of the host cannot be resolved
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if plan.interface:  # gloo's default is the interface of the host's name, which is often the loopback
        env.setdefault("GLOO_SOCKET_IFNAME", plan.interface)
        env.setdefault("NCCL_SOCKET_IFNAME", f"={plan.interface}")  # without `=`, NCCL treats it as a prefix
    return env


def start_workers(
    plan: NodePlan, store: StoreEndpoint, generation: int, inherited: InheritedResources
) -> Iterator[Worker]:
    """Start the workers one by one, rank 0 first, and relay their output. A terminal stays a terminal for the worker.

    Main thread only: the kernel treats the end of the starting thread as the end of the parent
    (host.procfs.die_with_parent).
    """
    for local_rank in range(plan.nproc):
        rank = plan.ranks.first + local_rank
        path = Path(plan.attempt_dir) / f"rank-{rank}.log"
        log = _open_log(path, generation)
        log_start = os.fstat(log).st_size
        # in memory and not in a file, so that a worker can record a failure because of a full disk
        record = os.memfd_create(f"paceline-record-{rank}")
        status_page = make_status_page(rank)
        is_shown = rank == 0 or plan.show == "all"
        is_direct = rank == max(0, plan.stdin_rank) and is_shown and os.isatty(1)  # its stdout is the terminal itself
        store_descriptor = store.inherited_fd(rank, plain=plan.plain_store)
        spec = WorkerSpec(
            agent_pid=os.getpid(), attempt_dir=plan.attempt_dir, generation=generation, record=record,
            page=status_page, store=store_descriptor, snapshots=inherited.snapshot_fds,
            temporary=inherited.temporary_folder, guarded=not plan.hang_timeout.off,
            shares_gradients=plan.collectives == "shared", speeds=plan.ranks.speeds, balance=plan.balance,
            devices=plan.devices, fixed_nodes=plan.fixed_nodes, min_nodes=plan.min_nodes,
            transfers=inherited.transfers, keeps_copy=inherited.keeps_copy,
        )  # fmt: skip
        env = worker_environment(plan, local_rank, store.port, generation) | spec.to_environment()
        env["MASTER_ADDR"] = store.address
        env[AGENT_MARK] = agent_mark(generation)
        pipes = [(*os.pipe(), screen) for screen in ((2,) if is_direct else (1, 2)) if is_shown]
        writers = {screen: writer for _, writer, screen in pipes}
        stdin = plan.stdin if plan.stdin_rank in (-1, rank) else -1
        if plan.stdin_rank not in (-1, rank):  # `breakpoint()` would read the end of the file, and end the run
            env.setdefault("PYTHONBREAKPOINT", "0")
        streams = {
            0: stdin if stdin >= 0 else subprocess.DEVNULL,
            1: writers.get(1, 1 if is_direct else log),
            2: writers.get(2, log),
        }
        fds = [number for number in (record, status_page, store_descriptor, *inherited.descriptors) if number >= 0]
        try:
            process = _start(plan, env, streams, fds, inherited.preloader)
        except OSError:
            for descriptor in (log, record, status_page, *(reader for reader, _, _ in pipes)):
                os.close(descriptor)
            raise
        finally:
            for writer in writers.values():
                os.close(writer)
        prefix = b"" if plan.show == "rank 0" else b"[rank %d] " % rank
        relays = [
            start_output_relay(os.fdopen(reader, "rb"), os.dup(log), screen=s, prefix=prefix) for reader, _, s in pipes
        ]
        os.close(log)
        member = RosterWorker(rank, process.pid, start_ticks(process.pid))
        yield Worker(member, process, path, log_start, relays, record, status_page)
    if inherited.preloader is not None and not plan.max_restarts and plan.min_nodes == plan.nodes:
        inherited.preloader.close()  # no restart is possible


def _start(
    plan: NodePlan, env: Mapping[str, str], streams: Mapping[int, int], fds: Sequence[int], preloader: Preloader | None
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Fork a worker from the preloader, or start its command, with the same environment and descriptors."""
    if preloader is not None:
        outputs = {number: streams[number] for number in (1, 2)}  # stdin is /dev/null, as in the preloader
        process = preloader.fork(env, {**outputs, **{descriptor: descriptor for descriptor in fds}})
        if process is not None:
            return process
    return subprocess.Popen(
        plan.argv, env=env, stdin=streams[0], stdout=streams[1], stderr=streams[2], pass_fds=fds, start_new_session=True
    )


def _open_log(path: Path, generation: int) -> int:
    log = writing.open_or_create(path, append=True)
    if generation:
        with suppress(OSError):  # a full disk must not stop the run
            os.write(log, f"---- generation {generation} ----\n".encode())
    return log


MAX_RECORD_BYTES = 1 << 20
LOG_TAIL_BYTES = 8192
LAST_OUTPUT_SECONDS = 0.2


class Workers:
    """The workers of an agent in one generation. Its methods do not wait for the workers: its owner does."""

    def __init__(self, plan: NodePlan, number: int, port: int) -> None:
        self.plan, self.number, self.port = plan, number, port
        self.left: Sequence[int] = ()  # pids of processes that SIGKILL has not ended
        self.stopping = self.swept = False
        self.patient = False
        """During a stop, a failed worker does not shorten the time of the others: a script may save on one rank."""
        self._sent: set[tuple[int, int]] = set()  # rank, signal
        self._workers: list[Worker] = []
        self._times: list[LogTimesWriter] = []
        self._deadline_seconds = math.inf
        self._ended: dict[int, tuple[int, float]] = {}  # rank -> (exit code, time of the sample)
        self._drained: set[int] = set()  # ranks with complete last output
        self._oom_kills_before = oom_kills()
        self._idle_clock, self._saves_asked = IdleTimer(), 0
        self.machine: NodeUtilizationLogger | None = None  # in the run folder; None for a run without a folder
        self.gate: StoreProxy | None = None  # relays the workers' connections to the store, for several hosts

    @classmethod
    def start(cls, plan: NodePlan, number: int, inherited: InheritedResources) -> Self:
        """Start all workers of generation `number`, or none."""
        if inherited.cleanup_fd >= 0:
            os.write(inherited.cleanup_fd, os.fsencode(plan.attempt_dir) + b"\0")  # the folder of the roster
        store = StoreEndpoint.make(plan)
        workers = cls(plan, number, store.port)
        workers.gate = store.proxy
        try:
            for worker in start_workers(plan, store, number, inherited):
                workers._workers.append(worker)
                workers._times.append(LogTimesWriter(worker.log))
                workers._write_roster()  # after each worker: the launcher kills the processes in the roster
        except BaseException:
            workers.kill_sessions()
            workers.close()
            raise
        finally:
            store.close()
        folder = Path(plan.run_dir).resolve()  # each node may have different links
        if plan.run_dir and folder.is_dir():
            pids = {worker.rank: worker.process.pid for worker in workers._workers}
            workers.machine = NodeUtilizationLogger(folder, plan.node, pids)
        return workers

    def _write_roster(self) -> None:
        members = tuple(worker.member for worker in self._workers)
        roster = Roster(os.uname().nodename, os.getpid(), members, start_ticks(os.getpid()))
        writing.replace_file(roster_path(Path(self.plan.attempt_dir), self.plan.node), msgspec.json.encode(roster))

    def execute(self, order: Order) -> None:
        """Execute an order of the coordinator, which executes it on its own node in the same way."""
        match order:
            case StopOrder(grace_seconds, number):
                self.stop(grace_seconds, number)
            case StopStepOrder(step):
                self._ask_to_stop_after(step)
            case UnblockOrder(ranks, word):  # raise an exception in the collective in which they wait
                for worker in self._workers:
                    if worker.rank in ranks:
                        release_from_collective(worker.status_page_fd, word.encode())

    def stop(self, grace_seconds: float, number: int = signal.SIGTERM) -> None:
        """Send this signal to the workers and give them this time to end. A later call can only shorten the time.

        With a grace of 0 no signal is sent: the workers would begin to save, but be killed before the end.
        """
        if not self.stopping:
            self.patient = self.plan.plain_store and not any(map(self._handles_stops, self._workers))
        for worker in self._workers if grace_seconds else ():
            self._ask_to_stop(worker, number)
        self.stopping = True
        self._deadline_seconds = min(self._deadline_seconds, time.monotonic() + grace_seconds)

    def _ask_to_stop(self, worker: Worker, number: int) -> None:
        """Send a signal to a worker, once.

        A training and a session always get SIGTERM. A script gets SIGTERM instead of a signal that it does not handle,
        since the default action would not save. Only SIGINT reaches the child processes of a script, as Ctrl-C does in
        a terminal: other signals would kill the DataLoader workers of a trainer that still saves. A program that is not
        Python gets all signals together with its child processes. A rank with a request to stop after a step gets
        no signal before the grace is over.
        """
        if not any(rank == worker.rank for rank, _ in self._sent) and read_counters(worker.status_page_fd).stop_asked:
            self._sent.add((worker.rank, number))
            return
        process, is_program = worker.process, not any(arg.startswith(RANK_PACKAGE) for arg in self.plan.argv)
        to_group = self.plan.plain_store and (is_program or number == signal.SIGINT)
        is_handled = is_program or number == signal.SIGINT or handles_signal(process.pid, number, ignoring=True)
        if not self.plan.plain_store or self._handles_stops(worker) or not is_handled:
            number, to_group = signal.SIGTERM, is_program and self.plan.plain_store
        if (worker.rank, number) in self._sent:
            return
        self._sent.add((worker.rank, number))
        if to_group and process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        else:
            process.send_signal(number)  # without effect if it has ended
        process.send_signal(signal.SIGCONT)  # afterwards: a suspended process continues with the signal pending

    def _ask_to_stop_after(self, step: int) -> None:
        for worker in self._workers:
            if read_counters(worker.status_page_fd).stops_by_step:
                if step:
                    set_counter(worker.status_page_fd, "stop_step", step)
                set_counter(worker.status_page_fd, "stop_asked", 1)

    @staticmethod
    def _handles_stops(worker: Worker) -> bool:
        counters = read_counters(worker.status_page_fd)
        return bool(counters.notes_stops or counters.stops_by_step)

    @property
    def seconds_until_kill(self) -> float:
        """The time until running workers are killed; 0 if none runs, or the time is over."""
        codes = self._codes()
        if None not in codes:
            return 0.0
        # a worker failed: the others cannot save together
        if not self.patient and not {*codes} <= {None, *SUCCESS_EXIT_CODES}:
            self.stop(self.plan.grace_seconds)
        return max(0.0, self._deadline_seconds - time.monotonic())

    def _codes(self) -> list[int | None]:
        return [worker.process.poll() for worker in self._workers]

    def worker_samples(self) -> list[RankSample]:
        now = time.monotonic()
        for worker, code in zip(self._workers, self._codes(), strict=True):
            if code is not None:
                self._ended.setdefault(worker.rank, (code, now))
        for times in self._times:
            times.record_growth()
        return [
            self._idle_clock.read_status_page(self._sample(worker), worker.status_page_fd, now)
            for worker in self._workers
        ]

    def _sample(self, worker: Worker) -> RankSample:
        code, ended_seconds = self._ended.get(worker.rank, (None, 0.0))
        failure = None if code in SUCCESS_EXIT_CODES else read_failure_record(worker.failure_record_fd)
        words = f"{failure.type}: {failure.message}" if failure is not None else ""
        if code and failure is None:  # wait only once: child processes may keep the pipe open
            wait_seconds = 0.0 if worker.rank in self._drained else LAST_OUTPUT_SECONDS
            self._drained.add(worker.rank)
            words = worker.log_tail(LOG_TAIL_BYTES, wait_seconds=wait_seconds)
        return RankSample(
            rank=worker.rank, host=os.uname().nodename, pid=worker.process.pid, node=self.plan.node, code=code,
            ended_seconds=ended_seconds, failure=failure, error_text=words,
        )  # fmt: skip

    def start_evidence_collection(self, question: int, patience_seconds: float) -> EvidenceCollection:
        status_pages = {worker.rank: worker.status_page_fd for worker in self._workers}
        return EvidenceCollection(self.worker_samples(), status_pages, question, patience_seconds=patience_seconds)

    def ask_to_save(self) -> None:
        """Have the first worker vote for a checkpoint after its next step: two votes at different steps save twice."""
        self._saves_asked += 1
        set_counter(self._workers[0].status_page_fd, "saves_asked", self._saves_asked)

    def ask_to_regroup(self) -> None:
        """Have all ranks save and end after their next step, by a vote of the first worker. A script does not react."""
        set_counter(self._workers[0].status_page_fd, "regroups", 1)

    def tensor_names(self) -> Mapping[str, Sequence[str]]:
        return read_tensor_and_call_names(self._workers[0].status_page_fd).tensors

    def oom_kills(self) -> int:
        before, now = self._oom_kills_before, oom_kills()
        return 0 if before is None or now is None else now - before

    def kill_sessions(self) -> None:
        self.stopping = True
        if self.machine is not None:
            self.machine.close()
        self.left = kill_sessions([worker.member for worker in self._workers], agent_mark(self.number))
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):  # SIGKILL does not end an uninterruptible system call
                worker.process.wait(1.0)
            for thread in worker.relays:  # so that the last output precedes the diagnosis
                thread.join(1.0)
        for times in self._times:
            times.record_growth(last=True)
        self.swept = True

    def close(self) -> None:
        for worker in self._workers:
            os.close(worker.failure_record_fd)
            os.close(worker.status_page_fd)
        for times in self._times:
            times.close()
        if self.gate is not None:
            self.gate.close()


def read_failure_record(descriptor: int) -> Failure | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, MAX_RECORD_BYTES, 0), type=Failure)
    except (OSError, msgspec.MsgspecError):  # no record, or an incomplete one
        return None
