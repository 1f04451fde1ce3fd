"""The agent for ranks that another launcher (torchrun, srun, mpirun) has started: `paceline watchover`.

Each node has one agent. The ranks attach to it through a socket (`protocol/control.py`). It watches them as an agent
watches the workers that it has started, with three differences. It does not start or restart ranks, it ends ranks only
if its plan allows it (`may_end`), and it ends with the last rank. After the rendezvous of the ranks, the agents of
several nodes connect to each other. The agent of node 0 makes the diagnosis, and the others follow it.
"""

import fcntl
import os
import secrets
import signal
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from paceline.errors import ExitCode, PacelineError
from paceline.guard.deaths import diagnosis_due_at_seconds, first_to_fail
from paceline.guard.sentences import format_ranks, format_subject_verb
from paceline.host.cleanup import RosterWorker, start_ticks
from paceline.host.procfs import read_process
from paceline.launch.agent.channel import Link, StartOrder, StartReply
from paceline.launch.agent.cluster import Generation, RemoteNodes
from paceline.launch.agent.coordinator import POLL_FAILING_SECONDS
from paceline.launch.agent.follower import Follower
from paceline.launch.agent.monitor import Monitor, StopReport
from paceline.launch.agent.workers import InheritedResources, Worker, Workers
from paceline.protocol import control
from paceline.protocol.evidence import SUCCESS_EXIT_CODES, Failure, RankSample
from paceline.protocol.job import NodePlan
from paceline.runs.console import print_to_stderr

if TYPE_CHECKING:
    import psutil

ARRIVAL_SECONDS = 60.0  # for all ranks of a node to attach
LATE_SECONDS = 1.0  # for one more rank, if all attached ranks have ended
LINGER_SECONDS = 30.0  # how long the agent of node 0 serves the others after its ranks have ended
NODE_CONNECT_SECONDS = 3.0  # for the other nodes to connect, if a failure comes first
PROGRESS_TOLERANCE_SECONDS = 1.0
LAST_QUESTION_SECONDS = 5.0
KILL_SECONDS = 2.0
IN_SLURM, FAREWELL_SECONDS = "SLURM_PROCID", 1.0  # srun ends the agent with the last rank, so a failed rank waits
LAUNCHER_CHECK_SECONDS = 1.0  # between two checks whether the launcher runs
PIDFD_INFO_BYTES, PIDFD_INFO_EXIT = 64, 1 << 3  # linux/pidfd.h
PIDFD_GET_INFO = 3 << 30 | PIDFD_INFO_BYTES << 16 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, struct pidfd_info)


def read_process_exit_code(pid: int, pidfd: int) -> int | None:
    """The exit code, as in `subprocess`, of an ended process that need not be a child; None if it is unknown.

    /proc has the code until the parent waits for the process. Since Linux 6.15, the descriptor has it afterwards.
    """
    if (process := read_process(pid)) is not None and not process.runs:
        return os.waitstatus_to_exitcode(process.wait_status)
    info = bytearray(struct.pack(f"=Q{PIDFD_INFO_BYTES - 8}x", PIDFD_INFO_EXIT))
    with suppress(OSError):
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
        if struct.unpack_from("=Q", info)[0] & PIDFD_INFO_EXIT:
            return os.waitstatus_to_exitcode(*struct.unpack_from("=i", info, PIDFD_INFO_BYTES - 4))
    return None


class ForeignProcess:
    """A process that is not a child of the agent. Raises OSError if it does not exist."""

    def __init__(self, pid: int) -> None:
        self.pid, self.pidfd = pid, os.pidfd_open(pid)
        process = read_process(pid)
        self._parent = process.parent if process else 0
        self.code: int | None = None  # its exit code, or the code that it has announced

    @property
    def is_orphan(self) -> bool:
        process = read_process(self.pid)
        return process is not None and process.runs and process.parent != self._parent

    def fileno(self) -> int:
        return self.pidfd  # readable once the process has ended

    def poll(self) -> int | None:
        if self.code is None and control.poll_readable([self], 0.0):
            code = read_process_exit_code(self.pid, self.pidfd)
            self.code = -signal.SIGKILL if code is None else code  # it sent no RankExit: it was killed
        return self.code

    def send_signal(self, number: int, /) -> None:
        with suppress(OSError):
            if self.poll() is None:
                signal.pidfd_send_signal(self.pidfd, number)

    def wait(self, timeout: float, /) -> int | None:
        control.poll_readable([self], timeout)
        return self.poll()


class AttachedWorkers(Workers, control.StopSignals):
    """The attached ranks of one node, and the orders to its agent. Ranks are ended only if `plan.may_end`.

    Signals are not orders: they reach all processes of a job, and the ranks handle them. The only order is the end of
    the launcher, if the agent may end the ranks.
    """

    def __init__(self, plan: NodePlan) -> None:
        super().__init__(plan, 0, 0)
        self.signals, self.launcher_gone = [], False
        self._looked_seconds, self._reported = time.monotonic(), False  # for the end of the launcher
        self.meeting: control.AgentAddress | None = None  # the address of node 0's agent, from a rank
        self._listener = socket.socket(fileno=plan.attach)
        self._listener.setblocking(False)
        self._connections: dict[socket.socket, int] = {}  # -> the pid of the peer
        self._first: socket.socket | None = None  # the connection to rank 0
        self._goodbyes: dict[socket.socket, float] = {}  # connections to leaving ranks -> deadline for releasing them
        self._processes: list[ForeignProcess] = []
        self._descendants: set[psutil.Process] = set()  # of the ranks that ran when `stop` was called

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(worker.rank for worker in self._workers)

    @property
    def all_here(self) -> bool:
        return len(self._workers) >= self.plan.nproc

    @property
    def running_processes(self) -> list[ForeignProcess]:
        return [process for process in self._processes if process.code is None]

    # ---- messages of the ranks ----

    def wait(self, seconds: float, also: Sequence[control.SupportsFileno] = ()) -> bool:
        """Wait up to `seconds` until a rank attaches, sends a message or ends, the launcher ends, or for `also`."""
        self.release_departing_ranks()
        running = self.running_processes
        readables = [*running, *self._connections, *([] if self.all_here else [self._listener])]
        ready = control.poll_readable([*readables, *also], seconds)
        is_woken = not ready.isdisjoint([readable.fileno() for readable in readables])
        for process in running:
            if process.fileno() in ready:
                process.poll()
        for connection in [connection for connection in self._connections if connection.fileno() in ready]:
            with suppress(BlockingIOError):
                self._process(connection, *control.receive(connection))
        if not self.all_here and self._listener.fileno() in ready:
            connection = self._listener.accept()[0]
            connection.setblocking(False)
            if (pid := control.peer_pid(connection)) > 0:
                self._connections[connection] = pid
            else:  # a process of another user, or one in a different PID namespace, which the agent cannot see
                connection.close()
        return self._notice_launcher_end() or is_woken

    def _notice_launcher_end(self) -> bool:
        if self._reported or time.monotonic() < self._looked_seconds + LAUNCHER_CHECK_SECONDS:
            return False
        self._looked_seconds = time.monotonic()
        if pids := [process.pid for process in self.running_processes if process.is_orphan]:
            self._reported, self.launcher_gone = True, self.plan.may_end
            remedy = "stopping them" if self.launcher_gone else f"to end them: kill {' '.join(map(str, pids))}"
            text = f"the launcher of the ranks on {os.uname().nodename} has ended"
            print_to_stderr(f"{text}, but the ranks still run; {remedy}")
        return self._reported

    def _process(self, connection: socket.socket, message: control.Message | None, descriptors: Sequence[int]) -> None:
        pid = self._connections[connection]
        match message:
            case control.Hello(rank) if self._add(rank, pid, descriptors):
                if rank == 0:
                    self._first = connection
                if self.all_here:
                    self._listener.close()  # the next start uses the same socket name
            case control.AgentAddress():
                self.meeting = message
            case control.RankExit(code):
                for process in self.running_processes:
                    if process.pid == pid:
                        process.code = code
                must_wait = code not in SUCCESS_EXIT_CODES and IN_SLURM in os.environ
                self._goodbyes[connection] = time.monotonic() + (FAREWELL_SECONDS if must_wait else 0.0)
                del self._connections[connection]
            case _:
                for descriptor in descriptors:
                    os.close(descriptor)
                del self._connections[connection]
                connection.close()

    def _add(self, rank: int, pid: int, descriptors: Sequence[int]) -> bool:
        """Add a rank with its status page and its failure record; return False if it cannot be a rank of this node."""
        if len(descriptors) != 2 or rank in self.ranks or self.all_here:
            return False
        try:
            process = ForeignProcess(pid)
        except OSError:  # it has ended already
            return False
        status_page, record = descriptors
        member = RosterWorker(rank, pid, start_ticks(pid))
        self._processes.append(process)
        self._workers.append(Worker(member, process, Path(os.devnull), 0, (), record, status_page))
        self._workers.sort(key=lambda worker: worker.rank)
        return True

    def release_departing_ranks(self, *, all_of_them: bool = False) -> None:
        """Let ranks end that have sent RankExit, once their time to wait is over, or all of them."""
        for connection in [at for at, due in self._goodbyes.items() if all_of_them or time.monotonic() >= due]:
            del self._goodbyes[connection]
            connection.close()

    def send_address_to_rank_0(self, meeting: control.AgentAddress) -> None:
        with suppress(OSError):
            if self._first is not None:
                control.send(self._first, meeting)

    # ---- overridden methods of Workers ----

    def _sample(self, worker: Worker) -> RankSample:
        sample = super()._sample(worker)
        if sample.failure is not None or sample.code is None or sample.code >= 0:
            return sample
        # If a rank fails or the user stops a launcher, it signals all ranks, and kills those that do not end
        stop_times = [at for code, at in self._ended.values() if -code in control.STOP_SIGNALS]
        is_killed_later = sample.code == -signal.SIGKILL and any(at < sample.ended_seconds for at in stop_times)
        if -sample.code not in control.STOP_SIGNALS and not is_killed_later:
            return sample
        name = signal.Signals(-sample.code).name
        rank, cause = (sample.rank, sample.host, sample.pid), f"ended by {name} from another process"
        failure = Failure(*rank, 128 - sample.code, name, cause, "", True, sample.ended_seconds)
        return replace(sample, error_text=cause, failure=failure)

    def stop(self, grace_seconds: float, number: int = signal.SIGTERM) -> None:
        if self.plan.may_end:
            import psutil  # an agent that only watches does not need it

            for process in self.running_processes:
                with suppress(psutil.Error):
                    self._descendants.update(psutil.Process(process.pid).children(recursive=True))
            super().stop(grace_seconds, number)

    def kill_sessions(self) -> None:
        """Kill the ranks that still run after `stop`, and their descendants, which mpirun does not end.

        The ranks may be in the session of the launcher, so `Workers.kill_sessions` would also kill the launcher.
        """
        if self.stopping:
            import psutil

            for process in self.running_processes:
                process.send_signal(signal.SIGKILL)
            deadline = time.monotonic() + KILL_SECONDS
            for process in self.running_processes:
                process.wait(max(0.0, deadline - time.monotonic()))
            for child in self._descendants:
                with suppress(psutil.Error):  # the child has ended
                    child.kill()
        self.left = [process.pid for process in self.running_processes if process.poll() is None]
        self.swept = True

    def close(self) -> None:
        super().close()
        for process in self._processes:
            os.close(process.pidfd)
        for connection in (*self._connections, *self._goodbyes, self._listener):
            connection.close()


class AttachedFollower(Follower):
    """The agent of a node other than node 0. It follows the agent of node 0 and starts no ranks."""

    def __init__(self, plan: NodePlan, attached: AttachedWorkers) -> None:
        super().__init__(plan, attached, InheritedResources(), lambda: None)
        self._ranks, self._attached, self._over_seconds = attached.ranks, attached, 0.0

    def _start(self, start: StartOrder, link: Link) -> StartReply:
        self._number, self._workers = start.generation, self._attached
        return StartReply(start.generation)

    def _coordinator_lost(self, link: Link) -> str:
        if not self._attached.running_processes:  # the agent of node 0 may still query them
            self._over_seconds = self._over_seconds or time.monotonic()
            if time.monotonic() > self._over_seconds + LAST_QUESTION_SECONDS:
                return "all its ranks have ended"
        return super()._coordinator_lost(link)

    def _stop_without_coordinator(self, reason: str) -> int:
        if not self._attached.running_processes or self._attached.stopping:
            return ExitCode.DONE
        print_to_stderr(
            f"cannot detect hangs between this node and others any more: the agent of node 0 is lost: {reason}"
        )
        return ExitCode.FAILED


class AttachedCoordinator:
    """Watches the ranks of one node, or on node 0 those of all nodes, until the last rank has ended."""

    def __init__(self, workers: AttachedWorkers) -> None:
        plan = self.plan = workers.plan
        self.workers = workers
        self.is_head = plan.ranks.first == 0 and plan.nodes > 1
        self.cluster = RemoteNodes(plan if self.is_head else replace(plan, nodes=1), workers)
        self._generation = Generation(plan, workers, self.cluster)
        self._stall_seconds: float | None = None  # time of the report of a stall that still lasts
        self._has_reported = False  # it has reported a failure
        self._is_apart = False  # node 0 is lost, or could not be reached
        self._over_seconds = 0.0

    def run(self) -> None:
        self._wait_for_ranks()
        try:
            self._watch()
        finally:
            self.cluster.end(ExitCode.DONE)

    def _wait_for_ranks(self) -> None:
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while not self.workers.all_here and time.monotonic() < deadline:
            if self.workers.ranks and not self.workers.running_processes:
                deadline = min(deadline, time.monotonic() + LATE_SECONDS)
            self.workers.wait(0.25)
        if not self.workers.all_here and self.workers.running_processes:
            attached = format_ranks(self.workers.ranks)
            part = f"{attached} of the {self.plan.nproc} on this node"
            print_to_stderr(f"watchover watches only {part}: the others did not attach")

    def _watch(self) -> None:
        if self.is_head:
            addresses = tuple(dict.fromkeys((*self.plan.node0, os.uname().nodename)))
            self.workers.send_address_to_rank_0(control.AgentAddress(addresses, self.cluster.port, self.plan.secret))
        monitor = Monitor(self._generation)
        while self._continues():
            is_failing = (
                diagnosis_due_at_seconds(self._generation.worker_samples()) is not None and not self._has_reported
            )
            self.cluster.wait_for_events(POLL_FAILING_SECONDS if is_failing else monitor.look_seconds)
            if self.workers.meeting is not None and not self.is_head and not self._is_apart:
                self._follow(self.workers.meeting)
            if self._accept_nodes() and self._has_all_ranks:
                monitor = Monitor(self._generation)  # a new monitor for all ranks
            if self.cluster.launcher_gone and not self._has_reported:
                self._end_all(control.LIFELINE_GRACE_SECONDS)
            if not self._has_reported:
                self._judge(monitor, self._generation.worker_samples())

    def _continues(self) -> bool:
        """Whether a watched rank runs, or has failed without a report yet."""
        if self.workers.running_processes:
            return True
        samples = self._generation.worker_samples()
        if diagnosis_due_at_seconds(samples) is not None and not self._has_reported:
            return True
        self._over_seconds = self._over_seconds or time.monotonic()
        return any(sample.is_running for sample in samples) and time.monotonic() < self._over_seconds + LINGER_SECONDS

    # ---- several nodes ----

    @property
    def _has_all_ranks(self) -> bool:
        return len(self._generation.worker_samples()) == self.plan.ranks.world_size

    def _accept_nodes(self) -> bool:
        """Accept the agents of other nodes that have connected; return whether the set of nodes has changed."""
        old_members = [*self._generation.members]
        for member in self.cluster.present_nodes:
            if member not in old_members:
                member.start(StartOrder(0, self.plan.ranks, "", ""))
        self._generation.members = [*self.cluster.members.values()]
        return self._generation.members != old_members

    def _follow(self, meeting: control.AgentAddress) -> None:
        plan = replace(
            self.plan, node0=meeting.addresses, node0_ports=(meeting.port,), secret=meeting.secret, join_seconds=30.0
        )
        try:
            # the agent of node 0 prints the reports, unless it is lost
            self._has_reported = AttachedFollower(plan, self.workers).run() == ExitCode.DONE
        except PacelineError as error:
            print_to_stderr(f"cannot detect hangs between this node and others: {error}")
        self._is_apart = True

    # ---- detection ----

    def _judge(self, monitor: Monitor, samples: Sequence[RankSample]) -> None:
        now = time.monotonic()
        if (due := diagnosis_due_at_seconds(samples)) is not None:
            # only the samples of all ranks show which ranks are victims of a failure on a different node
            is_complete = self._has_all_ranks or self._is_apart or self.plan.nodes == 1
            if now >= due + (0.0 if is_complete else NODE_CONNECT_SECONDS):
                self._report_failure(monitor, samples)
            return
        if self._stall_seconds is not None:
            stall_age = now - self._stall_seconds - PROGRESS_TOLERANCE_SECONDS
            moving_ranks = [sample.rank for sample in samples if sample.is_running and sample.still_seconds < stall_age]
            if not moving_ranks:
                return
            self._stall_seconds = None
            verb = format_subject_verb(moving_ranks, "is", "are")
            print_to_stderr(f"{verb} making progress again; the stall is over")
        if (stop := monitor.check()) is not None:
            self._stall_seconds = time.monotonic()
            self._report_stall(stop, len(samples))

    def _report_stall(self, stop: StopReport, count: int) -> None:
        if not self._has_all_ranks and not 0 < len(stop.diagnosis.causes) < count:  # the cause is on another node
            details = "".join(f"\n  {sentence}" for sentence in stop.diagnosis.sentences)
            node = f"{os.uname().nodename}, which is not connected to the other nodes"
            return print_to_stderr(f"no progress on {node}:{details}")
        print_to_stderr(stop.screen_text())
        if not self.plan.may_end:
            return print_to_stderr("watchover does not stop jobs. Stop it yourself, or rerun with --end")
        self._generation.unblock(stop.ranks_to_unblock, stop.unblock_message)
        return self._end_all(self.plan.grace_seconds)

    def _report_failure(self, monitor: Monitor, samples: Sequence[RankSample]) -> None:
        self._has_reported = True
        first = first_to_fail(samples)
        if first is not None and first.failure is not None and -(first.code or 0) in control.STOP_SIGNALS:
            return print_to_stderr(f"another process ended the ranks ({first.failure.type})")
        page = changed(monitor.judge_failure(samples), attempt_dir="").screen_text(self._generation.oom_kills())
        is_complete = self._has_all_ranks or self.plan.nodes == 1
        note = f"\nthis is the view of {os.uname().nodename}, which is not connected to all other nodes"
        print_to_stderr(page + ("" if is_complete else note))
        self.workers.release_departing_ranks(all_of_them=True)
        if self.plan.may_end:
            self._end_all(self.plan.grace_seconds)
        return None

    def _end_all(self, grace_seconds: float) -> None:
        self._has_reported = True
        self._generation.stop(grace_seconds)


def watch_attached_ranks(plan: NodePlan) -> int:
    """Run the agent of the ranks that attach at `plan.attach`. The exit code has no meaning."""
    for number in control.STOP_SIGNALS:  # they reach all processes of a job; the ranks decide how to react
        signal.signal(number, signal.SIG_IGN)
    workers = AttachedWorkers(replace(plan, secret=secrets.token_hex(32), node0_ports=(0,)))
    try:
        AttachedCoordinator(workers).run()
    except Exception as error:  # the ranks continue
        reason = f"{type(error).__name__}: {error}"
        print_to_stderr(f"warning: watchover has crashed; the ranks continue unwatched: {reason}")
    finally:
        workers.close()
    return ExitCode.DONE
