"""The agent of ranks that another launcher (torchrun, srun, mpirun) started: `paceline watchover`.

Each node has one. The ranks attach to it through a socket (`protocol/control.py`). It watches them as an agent watches
workers that it started. It differs in three ways: it does not start or restart ranks, it ends ranks only if its plan
allows it (`may_end`), and it ends with the last rank. After the ranks have met in torch's store, the agents of several
nodes connect to each other. The agent of node 0 diagnoses, the others follow it.
"""

import fcntl
import os
import secrets
import signal
import socket
import struct
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace as changed
from pathlib import Path

from msgspec.structs import replace

from paceline.errors import ExitCode, PacelineError
from paceline.guard.deaths import due_seconds, first_to_fail
from paceline.guard.sentences import clause, format_ranks
from paceline.host.procfs import PROC, processes, read_process
from paceline.host.sweep import Member
from paceline.launch.agent.channel import Link, StartOrder, StartReply
from paceline.launch.agent.cluster import Cluster, Generation
from paceline.launch.agent.follower import Follower
from paceline.launch.agent.head import POLL_FAILING_SECONDS
from paceline.launch.agent.monitor import Diagnosis, Monitor
from paceline.launch.agent.workers import Inherited, Worker, Workers
from paceline.protocol.control import (
    LIFELINE_GRACE_SECONDS,
    STOP_SIGNALS,
    Goodbye,
    Hello,
    Message,
    Orders,
    Readable,
    Rendezvous,
    peer_pid,
    receive,
    send,
    wait_readable,
)
from paceline.protocol.evidence import GOOD_ENDS, Failure, Sample
from paceline.protocol.job import NodePlan
from paceline.runs.console import say

ARRIVAL_SECONDS = 60.0  # for all ranks of a node to come
LATE_SECONDS = 1.0  # for one more, when all that have come are gone again
LINGER_SECONDS = 30.0  # that node 0's agent stays for the others when its own ranks are done
MEET_SECONDS = 3.0  # for the other nodes to come, if something has failed before they have
MOVED_SECONDS = 1.0
QUESTION_SECONDS = 5.0
KILL_SECONDS = 2.0
IN_SLURM, FAREWELL_SECONDS = "SLURM_PROCID", 1.0  # srun ends us with the last rank: it waits for the verdict
LAUNCHER_SECONDS = 1.0  # between two looks for the launcher
PIDFD_INFO_BYTES, PIDFD_INFO_EXIT = 64, 1 << 3  # linux/pidfd.h
PIDFD_GET_INFO = 3 << 30 | PIDFD_INFO_BYTES << 16 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, struct pidfd_info)


def exit_code(pid: int, pidfd: int) -> int | None:
    """The exit code of an ended process, which need not be a child, as in `subprocess`; None if it is unknown.

    /proc has it until the parent waits for the process. Since Linux 6.15 the descriptor has it afterwards.
    """
    with suppress(OSError, ValueError):
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        if fields[0] in "ZX":
            return os.waitstatus_to_exitcode(int(fields[-1]))
    info = bytearray(struct.pack(f"=Q{PIDFD_INFO_BYTES - 8}x", PIDFD_INFO_EXIT))
    with suppress(OSError):
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
        if struct.unpack_from("=Q", info)[0] & PIDFD_INFO_EXIT:
            return os.waitstatus_to_exitcode(*struct.unpack_from("=i", info, PIDFD_INFO_BYTES - 4))
    return None


class ForeignProcess:
    """A process that is not a child of the agent."""

    def __init__(self, pid: int) -> None:
        """Raises OSError if there is none."""
        self.pid, self.pidfd = pid, os.pidfd_open(pid)
        process = read_process(pid)
        self.start, self.parent = (process.start, process.parent) if process else (0, 0)
        self.code: int | None = None  # with which it has ended, or has announced to end

    @property
    def is_orphan(self) -> bool:
        """Whether it runs and its parent, the launcher, has ended."""
        process = read_process(self.pid) if self.code is None else None
        return process is not None and process.runs and process.parent != self.parent

    def fileno(self) -> int:
        """For select: readable when it has ended."""
        return self.pidfd

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        if self.code is None and wait_readable([self], 0.0):
            code = exit_code(self.pid, self.pidfd)
            self.code = -signal.SIGKILL if code is None else code  # it did not say goodbye: it was killed
        return self.code

    def send_signal(self, number: int, /) -> None:
        """Send a signal, unless the process has ended or announced its exit code."""
        with suppress(OSError):
            if self.poll() is None:
                signal.pidfd_send_signal(self.pidfd, number)

    def wait(self, timeout: float, /) -> int | None:
        """Wait until it ends, or the time is over."""
        wait_readable([self], timeout)
        return self.poll()


class AttachedWorkers(Workers):
    """The attached ranks of one node. They are ended only if `plan.may_end`.

    Raises:
        OSError: `plan.attach` is no socket.
    """

    def __init__(self, plan: NodePlan) -> None:
        super().__init__(plan, 0, 0)
        self.meeting: Rendezvous | None = None  # where node 0's agent is, as a rank has told us
        self._listener = socket.socket(fileno=plan.attach)
        self._listener.setblocking(False)
        self._connections: dict[socket.socket, int] = {}  # -> the pid at its other end
        self._first: socket.socket | None = None  # the connection to rank 0
        self._goodbyes: dict[socket.socket, float] = {}  # to ranks that leave, and when at the latest to let them go
        self._processes: list[ForeignProcess] = []
        self._started: dict[int, int] = {}  # pid -> start of the processes of the ranks when these were to end

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have attached."""
        return tuple(worker.rank for worker in self._workers)

    @property
    def all_here(self) -> bool:
        """Whether each rank of this node has come."""
        return len(self._workers) >= self.plan.nproc

    @property
    def running(self) -> list[ForeignProcess]:
        """The processes that run."""
        return [process for process in self._processes if process.code is None]

    # ---- they come, speak and end ----

    def wait(self, seconds: float, also: Sequence[Readable]) -> bool:
        """As `Orders.wait`: return after `seconds`, or earlier when a rank does something: True then."""
        self.let_go()
        running = self.running
        own = [*running, *self._connections, *([] if self.all_here else [self._listener])]
        ready = wait_readable([*own, *also], seconds)
        woken = not ready.isdisjoint([one.fileno() for one in own])
        for one in running:
            if one.fileno() in ready:
                one.poll()
        for connection in [one for one in self._connections if one.fileno() in ready]:
            with suppress(BlockingIOError):
                self._hear(connection, *receive(connection))
        if not self.all_here and self._listener.fileno() in ready:
            connection = self._listener.accept()[0]
            connection.setblocking(False)
            if (pid := peer_pid(connection)) > 0:
                self._connections[connection] = pid
            else:  # another user's; or one that cannot be seen from here: it has a /proc of its own
                connection.close()
        return woken

    def _hear(self, connection: socket.socket, message: Message | None, descriptors: Sequence[int]) -> None:
        pid = self._connections[connection]
        match message:
            case Hello(rank) if self._add(rank, pid, descriptors):
                if rank == 0:
                    self._first = connection
                if self.all_here:
                    self._listener.close()  # the next start has the same name
            case Rendezvous():
                self.meeting = message
            case Goodbye(code):
                for one in self.running:
                    if one.pid == pid:
                        one.code = code
                failed = code not in GOOD_ENDS and IN_SLURM in os.environ
                self._goodbyes[connection] = time.monotonic() + (FAREWELL_SECONDS if failed else 0.0)
                del self._connections[connection]
            case _:
                for descriptor in descriptors:
                    os.close(descriptor)
                del self._connections[connection]
                connection.close()

    def _add(self, rank: int, pid: int, descriptors: Sequence[int]) -> bool:
        """Take in a rank with its box and its record; False if it cannot be one of this node's."""
        if len(descriptors) != 2 or rank in self.ranks or self.all_here:
            return False
        try:
            process = ForeignProcess(pid)
        except OSError:  # it is gone already
            return False
        box, record = descriptors
        self._processes.append(process)
        self._workers.append(Worker(Member(rank, pid, process.start), process, Path(os.devnull), 0, (), record, box))
        self._workers.sort(key=lambda worker: worker.rank)
        return True

    def let_go(self, *, all_of_them: bool = False) -> None:
        """Let ranks end that have sent Goodbye, once their failure was passed on, or all of them."""
        for connection in [at for at, due in self._goodbyes.items() if all_of_them or time.monotonic() >= due]:
            del self._goodbyes[connection]
            connection.close()

    def tell_first(self, meeting: Rendezvous) -> None:
        """Have rank 0 pass it to the other nodes."""
        if self._first is not None:
            with suppress(OSError):
                send(self._first, meeting)

    # ---- as with workers that the agent started ----

    def _sample(self, worker: Worker) -> Sample:
        """The sample, in which a rank that its launcher has ended is a victim."""
        one = super()._sample(worker)
        if one.failure is not None or one.code is None or one.code >= 0:
            return one
        # launchers ask all to end when one fails, or when a person stops them, and kill those that do not
        asked = [at for code, at in self._ended.values() if -code in STOP_SIGNALS]
        killed_then = one.code == -signal.SIGKILL and any(at < one.ended_seconds for at in asked)
        if -one.code not in STOP_SIGNALS and not killed_then:
            return one
        name = signal.Signals(-one.code).name
        words = f"ended by {name}, from outside"
        failure = Failure(one.rank, one.host, one.pid, 128 - one.code, name, words, "", True, one.ended_seconds)
        return replace(one, words=words, failure=failure)

    def stop(self, grace_seconds: float, number: int = signal.SIGTERM) -> None:
        """As `Workers.stop`, if that is allowed."""
        if self.plan.may_end:
            self._started |= _descendants({one.pid for one in self.running})
            super().stop(grace_seconds, number)

    def sweep(self) -> None:
        """Kill the ranks that still run after `stop`, and the processes that they have started; mpirun leaves these.

        The ranks may be in the session of the launcher, so `Workers.sweep` would kill the launcher as well.
        """
        if self.stopping:
            for process in self.running:
                process.send_signal(signal.SIGKILL)
            deadline = time.monotonic() + KILL_SECONDS
            for process in self.running:
                process.wait(max(0.0, deadline - time.monotonic()))
            for pid, start in self._started.items():
                if (child := read_process(pid)) is not None and child.runs and child.start == start:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
        self.left = [one.pid for one in self.running if one.poll() is None]
        self.swept = True

    def close(self) -> None:
        """The last call of all."""
        super().close()
        for process in self._processes:
            os.close(process.pidfd)
        for connection in (*self._connections, *self._goodbyes, self._listener):
            connection.close()


def _descendants(pids: Collection[int]) -> dict[int, int]:
    """All descendants of these processes: pid -> start."""
    every, found = [*processes()], dict[int, int]()
    while more := {p.pid: p.start for p in every if p.pid not in found and (p.parent in pids or p.parent in found)}:
        found |= more
    return found


class AttachOrders(Orders):
    """The one order to an agent of attached ranks is the end of their launcher, if it may end them.

    Signals are no orders: they reach all processes of a job, and the ranks react to them.
    """

    def __init__(self, workers: AttachedWorkers) -> None:
        self.signals, self.launcher_gone, self._workers = [], False, workers
        self._looked_seconds, self._reported = time.monotonic(), False

    def wait(self, seconds: float, also: Sequence[Readable] = ()) -> bool:
        """Return after `seconds`, or earlier when a rank comes, ends or speaks, or one of `also` can be read."""
        woken = self._workers.wait(seconds, also)
        if self._reported or time.monotonic() < self._looked_seconds + LAUNCHER_SECONDS:
            return woken
        self._looked_seconds = time.monotonic()
        if pids := [process.pid for process in self._workers.running if process.is_orphan]:
            self._reported, self.launcher_gone = True, self._workers.plan.may_end
            remedy = "they are ended" if self.launcher_gone else f"to end them: kill {' '.join(map(str, pids))}"
            say(f"the launcher of the ranks on {os.uname().nodename} is gone, and they run on; {remedy}")
            return True
        return woken


class AttachedFollower(Follower):
    """The agent of a node other than node 0. It follows the agent of node 0 and starts no ranks."""

    def __init__(self, plan: NodePlan, orders: Orders, attached: AttachedWorkers) -> None:
        super().__init__(plan, orders, Inherited(), lambda: None)
        self._ranks, self._attached, self._over_seconds = attached.ranks, attached, 0.0

    def _start(self, start: StartOrder) -> StartReply:
        self._number, self._workers = start.generation, self._attached
        return StartReply(start.generation)

    def _head_lost(self, link: Link) -> str:
        if not self._attached.running:  # node 0's may still have a question about them
            self._over_seconds = self._over_seconds or time.monotonic()
            if time.monotonic() > self._over_seconds + QUESTION_SECONDS:
                return "all its ranks have ended"
        return super()._head_lost(link)

    def _alone(self, why: str) -> int:
        if not self._attached.running or self._attached.stopping:
            return ExitCode.DONE
        say(f"hangs between this node and others are no longer judged: the agent of node 0 is lost: {why}")
        return ExitCode.FAILED


class AttachedHead:
    """Watches the ranks of one node, and on node 0 of all, until the last has ended."""

    def __init__(self, workers: AttachedWorkers) -> None:
        self.plan, self.workers, self.orders = workers.plan, workers, AttachOrders(workers)
        plan, self.heads = self.plan, self.plan.ranks.first == 0 and self.plan.nodes > 1
        self.cluster = Cluster(plan if self.heads else replace(plan, nodes=1), self.orders)
        self._generation = Generation(plan, workers, self.cluster)
        self._stall_seconds: float | None = None  # when a stall was reported that still lasts
        self._reported = self._apart = False  # a failure was reported; node 0 is lost, or was never found
        self._over_seconds = 0.0

    def run(self) -> None:
        """Watch until the last rank has ended."""
        self._wait_for_ranks()
        try:
            self._watch()
        finally:
            self.cluster.end(ExitCode.DONE)

    def _wait_for_ranks(self) -> None:
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while not self.workers.all_here and (left := deadline - time.monotonic()) > 0:
            if not self.workers.running:  # also if no rank has come yet
                deadline = min(deadline, time.monotonic() + (LATE_SECONDS if self.workers.ranks else left))
            self.orders.wait(min(left, 0.25))
        if not self.workers.all_here and self.workers.running:
            here = format_ranks(self.workers.ranks)
            say(f"watchover sees {here} of the {self.plan.nproc} on this node: the others have not come")

    def _watch(self) -> None:
        if self.heads:
            addresses = tuple(dict.fromkeys((*self.plan.head, os.uname().nodename)))
            self.workers.tell_first(Rendezvous(addresses, self.cluster.port, self.plan.secret))
        monitor = Monitor(self._generation)
        while self._goes_on():
            failing = due_seconds(self._generation.samples()) is not None and not self._reported
            self.cluster.wait(POLL_FAILING_SECONDS if failing else monitor.look_seconds)
            if self.workers.meeting is not None and not self.heads and not self._apart:
                self._follow(self.workers.meeting)
            if self._take_in_nodes() and self._whole:
                monitor = Monitor(self._generation)  # another one, that knows all ranks
            if self.cluster.launcher_gone and not self._reported:
                self._end_all(LIFELINE_GRACE_SECONDS)
            if not self._reported:
                self._judge(monitor, self._generation.samples())

    def _goes_on(self) -> bool:
        """Whether a rank runs that this agent watches, or one has failed and that was not reported yet."""
        if self.workers.running:
            return True
        samples = self._generation.samples()
        if due_seconds(samples) is not None and not self._reported:
            return True
        self._over_seconds = self._over_seconds or time.monotonic()
        return any(one.runs for one in samples) and time.monotonic() < self._over_seconds + LINGER_SECONDS

    # ---- several nodes ----

    @property
    def _whole(self) -> bool:
        """Whether this agent knows all ranks of the job."""
        return len(self._generation.samples()) == self.plan.ranks.world_size

    def _take_in_nodes(self) -> bool:
        """Accept the agents of other nodes that have connected; whether there are any."""
        before = [*self._generation.members]
        for member in self.cluster.here:
            if member not in before:
                member.start(StartOrder(0, self.plan.ranks, "", ""))
        self._generation.members = [*self.cluster.members.values()]
        return self._generation.members != before

    def _follow(self, meeting: Rendezvous) -> None:
        """Take part in the guard of all nodes, as node 0's agent asks, until it is over."""
        plan = replace(
            self.plan, head=meeting.addresses, head_ports=(meeting.port,), secret=meeting.secret, join_seconds=30.0
        )
        try:
            # node 0's agent reports what there is to report, unless it is lost before
            self._reported = AttachedFollower(plan, self.orders, self.workers).run() == ExitCode.DONE
        except PacelineError as error:
            say(f"hangs between this node and others are not judged: {error}")
        self._apart = True

    # ---- judging ----

    def _judge(self, monitor: Monitor, samples: Sequence[Sample]) -> None:
        """Run the detectors that are due, and report a finding once."""
        now = time.monotonic()
        if (due := due_seconds(samples)) is not None:
            # who only lost others, or was interrupted by them, cannot be told from a part of the ranks
            if now >= due + (0.0 if self._whole or self._apart or self.plan.nodes == 1 else MEET_SECONDS):
                self._report_failure(monitor, samples)
            return
        if self._stall_seconds is not None:
            least = now - self._stall_seconds - MOVED_SECONDS
            moved = [one.rank for one in samples if one.runs and one.still_seconds < least]
            if not moved:
                return
            self._stall_seconds = None
            say(f"{clause(moved, 'is', 'are')} making progress again; the stall is over")
        if (diagnosis := monitor.look()) is not None:
            self._stall_seconds = time.monotonic()
            self._report_stall(diagnosis, len(samples))

    def _report_stall(self, diagnosis: Diagnosis, seen: int) -> None:
        if not self._whole and not 0 < len(diagnosis.verdict.guilty) < seen:  # those that are waited for are elsewhere
            where = "".join(f"\n  {sentence}" for sentence in diagnosis.verdict.sentences)
            return say(f"nothing moves on {os.uname().nodename}, and other nodes are not seen from here:{where}")
        say(diagnosis.page())
        if not self.plan.may_end:
            return say("watchover does not stop jobs. Stop it yourself, or rerun with --end")
        self._generation.unblock(diagnosis.unblocked, diagnosis.word)
        return self._end_all(self.plan.grace_seconds)

    def _report_failure(self, monitor: Monitor, samples: Sequence[Sample]) -> None:
        self._reported = True
        first = first_to_fail(samples)
        if first is not None and first.failure is not None and -(first.code or 0) in STOP_SIGNALS:
            return say(f"the ranks were ended from outside ({first.failure.type})")
        page = changed(monitor.judge_failure(samples), attempt_dir="").page(self._generation.oom_kills())
        whole = self._whole or self.plan.nodes == 1
        say(page + ("" if whole else f"\nas {os.uname().nodename} sees it, which has not met all other nodes"))
        self.workers.let_go(all_of_them=True)
        if self.plan.may_end:
            self._end_all(self.plan.grace_seconds)
        return None

    def _end_all(self, grace_seconds: float) -> None:
        self._reported = True
        self._generation.stop(grace_seconds)


def watch_over(plan: NodePlan) -> int:
    """Run the agent of the ranks that attach at `plan.attach`; the exit code has no meaning."""
    for number in STOP_SIGNALS:  # they reach all of a job's processes, and it is the ranks that decide what they mean
        signal.signal(number, signal.SIG_IGN)
    workers = AttachedWorkers(replace(plan, secret=secrets.token_hex(32), head_ports=(0,)))
    try:
        AttachedHead(workers).run()
    except Exception as error:  # the ranks run on
        say(f"warning: watchover has failed, and sees nothing any more: {type(error).__name__}: {error}")
    finally:
        workers.close()
    return ExitCode.DONE
