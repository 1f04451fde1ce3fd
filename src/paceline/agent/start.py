"""Start one node's workers: their environment, where their output goes, what they inherit."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.agent.preload import Forked, Preloader
from paceline.agent.relay import relay
from paceline.agent.store import Store
from paceline.contract.birth import WorkerBirth
from paceline.contract.box import make_box
from paceline.contract.node_plan import NodePlan
from paceline.contract.variables import AGENT_MARK, RUN_ID, SHARED_MEMORY
from paceline.disk import writing
from paceline.host.procfs import read_process
from paceline.host.sweep import Member, mark_of

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
    """Two empty memory files for each rank of the first generation: one can be written while the other is whole."""
    return tuple(
        (os.memfd_create(f"paceline-snapshot-{rank}-0"), os.memfd_create(f"paceline-snapshot-{rank}-1"))
        for rank in range(nproc)
    )


class Process(Protocol):
    """What an agent needs of a process, whoever started it."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""

    def wait(self, timeout: float, /) -> int | None:
        """Wait until it ends, or the time is over: None, or subprocess.TimeoutExpired."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal; one that has ended gets none."""


@dataclass(frozen=True)
class Worker:
    """One worker, what it shares with its agent, and the relay of its error output if it has one."""

    member: Member
    process: Process
    log: Path
    log_start: int  # its first byte in the log; what is before it is an earlier generation's
    relays: Sequence[threading.Thread]
    record: int
    box: int

    @property
    def rank(self) -> int:
        """Its place among all ranks of all nodes."""
        return self.member.rank

    def log_tail(self, size_bytes: int, *, wait_seconds: float) -> str:
        """The end of its log; waits so long for its last words, which may still be in the pipe."""
        for relay_ in self.relays:
            relay_.join(wait_seconds)
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log_start, os.fstat(file.fileno()).st_size - size_bytes))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def finish(self) -> None:
        """Wait until its last words are on the screen; they come before the verdict."""
        for relay_ in self.relays:
            relay_.join(1.0)


def worker_environment(plan: NodePlan, local_rank: int, port: int, generation: int = 0) -> dict[str, str]:
    """What a worker sees: torchrun's variables, the whole contract between launching and training, and ours."""
    rank = plan.first_rank + local_rank
    env = {name: value for name, value in os.environ.items() if not name.startswith(OURS) or name in THE_USERS}
    env |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(plan.nproc),
        "GROUP_RANK": str(plan.group_rank),
        "GROUP_WORLD_SIZE": str(plan.groups),
        "ROLE_NAME": plan.role,
        "ROLE_RANK": str(rank),  # all ranks have one role
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "TORCHELASTIC_RUN_ID": plan.rdzv_id or plan.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(plan.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 opens its own
        "TORCHELASTIC_ERROR_FILE": str(Path(plan.attempt_dir) / _elastic_error(rank, generation)),
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


def _elastic_error(rank: int, generation: int) -> str:
    """The file into which torch's `record` writes an exception; a name beside that of our own record."""
    return f"torchelastic-error-{rank}.json" if not generation else f"torchelastic-error-{rank}-{generation}.json"


def start_workers(plan: NodePlan, store: Store, generation: int, inherited: Inherited) -> Iterator[Worker]:
    """Start them one by one, rank 0 first. What it prints is also the agent's output (a terminal stays a terminal).

    Main thread only: the kernel takes a thread's end for the parent's (host.procfs.die_with_parent).

    Raises:
        OSError: when the command or a log file cannot be opened.
    """
    agent = read_process(os.getpid())
    for local_rank in range(plan.nproc):
        rank = plan.first_rank + local_rank
        path = Path(plan.attempt_dir) / f"rank-{rank}.log"
        log = _open_log(path, generation)
        log_start = os.fstat(log).st_size
        # Memory, not a file: a worker that fails because the disk is full must still be able to say so.
        record = os.memfd_create(f"paceline-record-{rank}")
        box = make_box(rank)
        shown = rank == 0 or plan.show == "all"
        direct = rank == max(0, plan.stdin_rank) and shown and os.isatty(1)  # what draws on a terminal must see one
        meet = store.inherited(rank, plain=plan.plain_store)
        birth = WorkerBirth(
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
        env = worker_environment(plan, local_rank, store.port_number(plan), generation) | birth.variable()
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
        relays = [relay(os.fdopen(reader, "rb"), os.dup(log), screen=s, prefix=prefix) for reader, _, s in pipes]
        os.close(log)
        seen = read_process(process.pid)
        member = Member(rank, process.pid, seen.start if seen else 0)
        yield Worker(member, process, path, log_start, relays, record, box)
    if inherited.preloader is not None and not plan.max_restarts and plan.min_nodes == plan.nodes:
        inherited.preloader.close()  # there will be no other start


def _start(
    plan: NodePlan, env: Mapping[str, str], streams: Mapping[int, int], kept: Sequence[int], preloader: Preloader | None
) -> subprocess.Popen[bytes] | Forked:
    """Fork it from what has imported everything already, or have it begin from nothing; what it sees is the same."""
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
