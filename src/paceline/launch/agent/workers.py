"""The workers of one node in one generation: started, observed, asked to stop, and ended.

A worker starts with an environment, a log, and inherited descriptors.
"""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import msgspec

from paceline.guard.collect import Collection, IdleClock
from paceline.host.cgroup import oom_kills
from paceline.host.machine_log import MachineLog
from paceline.host.procfs import read_process
from paceline.host.sweep import Member, Roster, mark_of, roster_path, sweep, tell_janitor
from paceline.launch.agent.preload import Forked, Preloader
from paceline.launch.agent.store import Store, StoreGate
from paceline.launch.output import relay_rank
from paceline.protocol.control import AGENT_MARK, ROOM, RUN_ID, SHARED_MEMORY, WorkerSpec
from paceline.protocol.evidence import GOOD_ENDS, Failure, Sample
from paceline.protocol.job import NodePlan
from paceline.protocol.marks import read_names
from paceline.protocol.status_page import (
    ask_to_regroup,
    ask_to_save,
    make_status_page,
    read_counters,
    release,
    takes_signal,
)
from paceline.runs import writing
from paceline.runs.attempt import TimesWriter

OURS = "PACELINE_"
THE_USERS = (SHARED_MEMORY,)  # named as ours, and yet a wish of whoever starts a run


@dataclass(frozen=True)
class Inherited:
    """Descriptors that last as long as the agent; workers of every generation inherit them, under the same number."""

    snapshots: tuple[tuple[int, int], ...] = ()  # two memory files for each local rank: what is in them is theirs
    keep_open: tuple[int, ...] = ()  # e.g. a lock that is to last until the last worker is gone
    janitor: int = -1  # not inherited: where the janitor learns the attempt's folder
    temporary: str = ""  # a folder that goes with the agent, however it ends
    preloader: Preloader | None = None  # not inherited: what workers are forked from

    @property
    def all(self) -> list[int]:
        """Every one of them."""
        return [*(descriptor for pair in self.snapshots for descriptor in pair), *self.keep_open]


def make_snapshots(nproc: int) -> tuple[tuple[int, int], ...]:
    """Two empty memory files for each rank of the first generation: one is complete while the other is written."""
    return tuple(
        (os.memfd_create(f"paceline-snapshot-{rank}-0"), os.memfd_create(f"paceline-snapshot-{rank}-1"))
        for rank in range(nproc)
    )


class Process(Protocol):
    """The methods of a process that an agent uses."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""

    def wait(self, timeout: float, /) -> int | None:
        """Wait until it ends, or the time is over: None, or subprocess.TimeoutExpired."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal, unless it has ended."""


@dataclass(frozen=True)
class Worker:
    """One worker, its memory files that the agent reads, and the threads that relay its output."""

    member: Member
    process: Process
    log: Path
    log_start: int  # its first byte in the log; what is before it is an earlier generation's
    relays: Sequence[threading.Thread]
    record: int
    box: int

    @property
    def rank(self) -> int:
        """Its rank in the world."""
        return self.member.rank

    def log_tail(self, size_bytes: int, *, wait_seconds: float) -> str:
        """The end of its log; waits `wait_seconds` for its last output, which may still be in the pipe."""
        for relay_ in self.relays:
            relay_.join(wait_seconds)
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log_start, os.fstat(file.fileno()).st_size - size_bytes))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def finish(self) -> None:
        """Wait until its last output is on the screen: it comes before the verdict."""
        for relay_ in self.relays:
            relay_.join(1.0)


def worker_environment(plan: NodePlan, local_rank: int, port: int, generation: int = 0) -> dict[str, str]:
    """The environment of a worker: torchrun's variables and ours."""
    ranks, rank = plan.ranks, plan.ranks.first + local_rank
    later = f"-{generation}" if generation else ""
    env = {name: value for name, value in os.environ.items() if not name.startswith(OURS) or name in THE_USERS}
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
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 opens its own
        # torch's `record` writes an exception there; a name beside that of our own record
        "TORCHELASTIC_ERROR_FILE": str(Path(plan.attempt_dir) / f"torchelastic-error-{rank}{later}.json"),
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(plan.threads),
        RUN_ID: plan.run_id,
    }
    # a killed worker takes unwritten lines with it, a crashed one its Python stack; a user's own setting stays
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.setdefault("PYTHONFAULTHANDLER", "1")
    env.setdefault("TORCH_FR_BUFFER_SIZE", "256")  # collectives that torch remembers: dumping its 2000 takes 20 ms
    if not plan.stall_after.off:  # else torch's watchdog ends a rank that the guard has freed before it has saved
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    env.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")  # else two groups on one GPU may wait for each other
    env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, at the first matrix product
    if plan.master_addr == "127.0.0.1" and sys.platform == "linux":
        # One host: gradients stay on the loopback, and a host whose own name does not resolve does no harm.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if plan.interface:  # left alone, gloo takes the one that the host's own name resolves to: often the loopback
        env.setdefault("GLOO_SOCKET_IFNAME", plan.interface)
        env.setdefault("NCCL_SOCKET_IFNAME", f"={plan.interface}")  # else all whose names begin so
    return env


def start_workers(plan: NodePlan, store: Store, generation: int, inherited: Inherited) -> Iterator[Worker]:
    """Start them one by one, rank 0 first. The agent prints its output as well (a terminal stays a terminal).

    Main thread only: the kernel takes a thread's end for the parent's (host.procfs.die_with_parent).

    Raises:
        OSError: when the command or a log file cannot be opened.
    """
    agent = read_process(os.getpid())
    for local_rank in range(plan.nproc):
        rank = plan.ranks.first + local_rank
        path = Path(plan.attempt_dir) / f"rank-{rank}.log"
        log = _open_log(path, generation)
        log_start = os.fstat(log).st_size
        # Memory, not a file: a worker that fails because the disk is full must still be able to say so.
        record = os.memfd_create(f"paceline-record-{rank}")
        box = make_status_page(rank)
        shown = rank == 0 or plan.show == "all"
        direct = rank == max(0, plan.stdin_rank) and shown and os.isatty(1)  # what draws on a terminal must see one
        meet = store.inherited(rank, plain=plan.plain_store)
        spec = WorkerSpec(
            agent_pid=os.getpid(),
            attempt_dir=plan.attempt_dir,
            generation=generation,
            record=record,
            box=box,
            store=meet,
            snapshots=inherited.snapshots,
            temporary=inherited.temporary,
            guarded=not plan.stall_after.off,
            shares_gradients=plan.collectives == "shared",
        )
        env = worker_environment(plan, local_rank, store.port_number(plan), generation) | spec.variable()
        env["MASTER_ADDR"] = store.address(plan)
        if agent is not None:
            env[AGENT_MARK] = mark_of(agent.pid, agent.start, generation)
        pipes = [(*os.pipe(), screen) for screen in ((2,) if direct else (1, 2)) if shown]
        writing = {screen: writer for _, writer, screen in pipes}
        streams = {1: writing.get(1, 1 if direct else log), 2: writing.get(2, log)}
        reads = plan.stdin if plan.stdin_rank in (-1, rank) else -1
        streams = {0: reads if reads >= 0 else subprocess.DEVNULL, **streams}
        kept = [number for number in (record, box, meet, *inherited.all) if number >= 0]
        try:
            process = _start(plan, env, streams, kept, inherited.preloader)
        except OSError:
            for descriptor in (log, record, box, *(reader for reader, _, _ in pipes)):
                os.close(descriptor)
            raise
        finally:
            for writer in writing.values():
                os.close(writer)
        prefix = b"" if plan.show == "rank 0" else b"[rank %d] " % rank
        relays = [relay_rank(os.fdopen(reader, "rb"), os.dup(log), screen=s, prefix=prefix) for reader, _, s in pipes]
        os.close(log)
        seen = read_process(process.pid)
        member = Member(rank, process.pid, seen.start if seen else 0)
        yield Worker(member, process, path, log_start, relays, record, box)
    if inherited.preloader is not None and not plan.max_restarts and plan.min_nodes == plan.nodes:
        inherited.preloader.close()  # there will be no other start


def _start(
    plan: NodePlan, env: Mapping[str, str], streams: Mapping[int, int], kept: Sequence[int], preloader: Preloader | None
) -> subprocess.Popen[bytes] | Forked:
    """Fork it from the preloader, or start its command; it gets the same environment and descriptors."""
    if preloader is not None:
        outputs = {number: streams[number] for number in (1, 2)}  # it has /dev/null as standard input, as they have
        forked = preloader.fork(env, {**outputs, **{descriptor: descriptor for descriptor in kept}})
        if forked is not None:
            return forked
    return subprocess.Popen(
        plan.argv,
        env=env,
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        pass_fds=kept,
        start_new_session=True,
    )


def _open_log(path: Path, generation: int) -> int:
    log = writing.keep(path, append=True)
    if generation:
        with suppress(OSError):  # a full disk does not keep a run from going on
            os.write(log, f"---- generation {generation} ----\n".encode())
    return log


MAX_RECORD_BYTES = 1 << 20
LOG_TAIL_BYTES = 8192
LAST_WORDS_SECONDS = 0.2


class Workers:
    """The workers of an agent in one generation. Its methods do not wait for the workers; its owner does.

    `plan` is the agent's, with the ranks of this generation; `port` is the store's.
    """

    def __init__(self, plan: NodePlan, number: int, port: int) -> None:
        self.plan, self.number, self.port = plan, number, port
        self.left: Sequence[int] = ()  # what not even SIGKILL has ended
        self.stopping = self.swept = False
        self.patient = False
        """one that ends badly, when asked to, takes none of the others' time: scripts may save on one rank alone"""
        self._sent: set[tuple[int, int]] = set()  # rank, signal
        self._workers: list[Worker] = []
        self._times: list[TimesWriter] = []
        self._deadline_seconds = math.inf
        self._ended: dict[int, tuple[int, float]] = {}  # rank -> exit code, when seen
        self._drained: set[int] = set()  # ranks whose last words have been waited for
        self._oom_kills_before = oom_kills()
        self._stillness, self._saves_asked = IdleClock(), 0
        self.machine: MachineLog | None = None
        """what this machine does, in the run's folder; None for a run without one"""
        self.gate: StoreGate | None = None
        """by which our workers come to the store of several hosts"""

    @classmethod
    def start(cls, plan: NodePlan, number: int, inherited: Inherited) -> Self:
        """Start all workers of generation `number`, or none.

        Raises:
            UsageError: when the port is taken.
            OSError: when the command or a log file cannot be opened.
        """
        if inherited.janitor >= 0:
            tell_janitor(inherited.janitor, plan.attempt_dir)
        store = Store.make(plan)
        workers = cls(plan, number, store.port_number(plan))
        workers.gate = store.gate
        try:
            for worker in start_workers(plan, store, number, inherited):
                workers._workers.append(worker)
                workers._times.append(TimesWriter(worker.log))
                workers._write_roster()  # after each: whoever sweeps must know all that run
        except BaseException:
            workers.sweep()
            workers.close()
            raise
        finally:
            store.close()
        workers._log_machine()
        return workers

    def _log_machine(self) -> None:
        folder = Path(self.plan.run_dir).resolve()  # as the node sees it: perhaps behind links of its own
        if self.plan.run_dir and folder.is_dir():
            pids = {worker.rank: worker.process.pid for worker in self._workers}
            self.machine = MachineLog(folder, self.plan.node, pids)

    def _write_roster(self) -> None:
        agent = read_process(os.getpid())
        members = tuple(w.member for w in self._workers)
        roster = Roster(os.uname().nodename, os.getpid(), members, agent.start if agent else 0)
        writing.replace(roster_path(Path(self.plan.attempt_dir), self.plan.node), msgspec.json.encode(roster))

    def stop(self, grace_seconds: float, number: int = signal.SIGTERM) -> None:
        """Send the workers this signal, and have them end within this time; a later call can only shorten the time.

        Without any grace no signal is sent: the workers would begin to save, and be killed before they have saved.
        """
        if not self.stopping:
            self.patient = self.plan.plain_store and not any(map(self._notes_stops, self._workers))
        for worker in self._workers if grace_seconds else ():
            self._ask_to_stop(worker, number)
        self.stopping = True
        self._deadline_seconds = min(self._deadline_seconds, time.monotonic() + grace_seconds)

    def _ask_to_stop(self, worker: Worker, number: int) -> None:
        """Send it the signal, once. Only what Ctrl-C sends reaches all that a script has started, as in a terminal.

        For a trainer's DataLoader workers must not die under it. A training, and a session, hear SIGTERM whatever was
        sent; so does a script that does not handle what was: it may handle that, and a default action saves nothing.
        """
        process, program = worker.process, not any(word.startswith(ROOM) for word in self.plan.argv)
        to_group = self.plan.plain_store and (program or number == signal.SIGINT)
        handled = program or number == signal.SIGINT or takes_signal(process.pid, number, ignoring=True)
        if not self.plan.plain_store or self._notes_stops(worker) or not handled:
            number, to_group = signal.SIGTERM, program and self.plan.plain_store
        if (worker.rank, number) in self._sent:
            return
        self._sent.add((worker.rank, number))
        if to_group and process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        else:
            process.send_signal(number)  # nothing happens to one that has ended
        process.send_signal(signal.SIGCONT)  # after it: a stopped one wakes up with the request pending

    @staticmethod
    def _notes_stops(worker: Worker) -> bool:
        return read_counters(worker.box).notes_stops

    @property
    def seconds_left(self) -> float:
        """The time until running workers are killed; 0 if none runs, or the time is over."""
        codes = self._codes()
        if None not in codes:
            return 0.0
        if not self.patient and not {*codes} <= {None, *GOOD_ENDS}:  # there is nothing left to save together
            self.stop(self.plan.grace_seconds)
        return max(0.0, self._deadline_seconds - time.monotonic())

    def _codes(self) -> list[int | None]:
        """By local rank; None while one runs, -n if signal n killed it."""
        return [worker.process.poll() for worker in self._workers]

    def samples(self) -> list[Sample]:
        """The state of each worker now."""
        now = time.monotonic()
        for worker, code in zip(self._workers, self._codes(), strict=True):
            if code is not None:
                self._ended.setdefault(worker.rank, (code, now))
        for times in self._times:
            times.look()
        return [self._stillness.read(self._sample(worker), worker.box, now) for worker in self._workers]

    def _sample(self, worker: Worker) -> Sample:
        code, ended_seconds = self._ended.get(worker.rank, (None, 0.0))
        failure = None if code in GOOD_ENDS else read_record(worker.record)
        words = f"{failure.type}: {failure.message}" if failure is not None else ""
        if code and failure is None:  # once is enough: what it has started may keep the pipe open
            wait_seconds = 0.0 if worker.rank in self._drained else LAST_WORDS_SECONDS
            self._drained.add(worker.rank)
            words = worker.log_tail(LOG_TAIL_BYTES, wait_seconds=wait_seconds)
        return Sample(
            rank=worker.rank, host=os.uname().nodename, pid=worker.process.pid, node=self.plan.node, code=code,
            ended_seconds=ended_seconds, failure=failure, words=words,
        )  # fmt: skip

    def collect(self, question: int, patience_seconds: float) -> Collection:
        """Begin to collect details of what all workers do; see `Collection`."""
        boxes = {worker.rank: worker.box for worker in self._workers}
        return Collection(self.samples(), boxes, question, patience_seconds=patience_seconds)

    def release(self, ranks: Sequence[int], word: bytes) -> None:
        """Raise an exception in the collective in which those of `ranks` wait that are ours, with this message."""
        for worker in self._workers:
            if worker.rank in ranks:
                release(worker.box, word)

    def ask_to_save(self) -> None:
        """Have the first worker vote for a checkpoint after its next step; a script does not react.

        Only the first: two workers that vote at different steps would save twice.
        """
        self._saves_asked += 1
        ask_to_save(self._workers[0].box, self._saves_asked)

    def ask_to_regroup(self) -> None:
        """Have all ranks save and end after their next step, by the first worker's vote; a script does not react."""
        ask_to_regroup(self._workers[0].box)

    def names(self) -> Mapping[str, Sequence[str]]:
        """The names of the tensors of a script, by layout."""
        return read_names(self._workers[0].box).tensors

    def oom_kills(self) -> int:
        """The number of processes that the kernel has killed for memory since this generation's start."""
        before, now = self._oom_kills_before, oom_kills()
        return 0 if before is None or now is None else now - before

    def sweep(self) -> None:
        """Kill all workers and all processes that they have started."""
        self.stopping = True
        if self.machine is not None:
            self.machine.close()
        agent = read_process(os.getpid())
        mark = mark_of(os.getpid(), agent.start, self.number) if agent else ""  # the next one may be on its way
        self.left = sweep([worker.member for worker in self._workers], mark)
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):  # in an uninterruptible system call: not even SIGKILL ends it yet
                worker.process.wait(1.0)
            worker.finish()
        for times in self._times:
            times.look(last=True)
        self.swept = True

    def close(self) -> None:
        """Close all descriptors, after `sweep`."""
        for worker in self._workers:
            os.close(worker.record)
            os.close(worker.box)
        for times in self._times:
            times.close()
        if self.gate is not None:
            self.gate.close()


def read_record(descriptor: int) -> Failure | None:
    """The failure that a worker has recorded, if any."""
    try:
        return msgspec.json.decode(os.pread(descriptor, MAX_RECORD_BYTES, 0), type=Failure)
    except (OSError, msgspec.MsgspecError):  # not, or not yet wholly
        return None
