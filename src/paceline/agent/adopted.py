"""Workers that another launcher has started: they come by themselves, and nobody is started or restarted.

They are looked at as our own are: by their boxes, their records and /proc. But this process is no parent of theirs, so
how one ended is asked of the kernel, or was said by the rank itself before it left.
"""

import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from paceline.agent.start import Worker
from paceline.agent.stranger import Stranger
from paceline.agent.workers import Workers
from paceline.contract.evidence import Sample
from paceline.contract.failure import GOOD_ENDS, Failure
from paceline.contract.introduction import Introduction, Leaving, Meeting, own_peer, receive_word, send_word
from paceline.contract.node_plan import NodePlan
from paceline.contract.orders import STOP_SIGNALS, Orders, Readable
from paceline.host.procfs import descendants, exit_code, read_process
from paceline.host.sweep import Member
from paceline.observe.terminal import say

KILL_SECONDS = 2.0
IN_SLURM, FAREWELL_SECONDS = "SLURM_PROCID", 1.0  # srun ends us with the last rank: it waits until all is told
LOOK_SECONDS = 1.0  # between two looks for the launcher


class Adopted(Workers):
    """The ranks of one node that have introduced themselves.

    `door` listens for them; nobody is ended unless `may_end`.
    """

    def __init__(self, plan: NodePlan, door: socket.socket, *, may_end: bool) -> None:
        super().__init__(plan, 0, 0)
        self.meeting: Meeting | None = None  # where the other nodes' observers are, as a rank has told us
        self.first: socket.socket | None = None  # the connection to local rank 0
        self.may_end = may_end
        self._door: socket.socket | None = door
        self._knocks: dict[socket.socket, int] = {}  # connection -> the pid at its other end
        self._strangers: dict[int, Stranger] = {}
        self._farewells: dict[socket.socket, float] = {}  # to ranks that leave, and when at the latest
        self._parents: dict[int, int] = {}  # rank -> its launcher's process on this node
        self._started: dict[int, int] = {}  # pid -> start of what the ranks had started when they were to end

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that are here, or were."""
        return tuple(worker.rank for worker in self._workers)

    @property
    def all_here(self) -> bool:
        """Whether each rank of this node has come."""
        return len(self._workers) >= self.plan.nproc

    @property
    def over(self) -> bool:
        """Whether none of those that came runs any more."""
        return all(one.code is not None for one in self._strangers.values())

    def orphans(self) -> list[int]:
        """The pids of those that run, and whose launcher does not any more."""
        running = [worker for worker in self._workers if self._strangers[worker.rank].code is None]
        now = {worker.rank: read_process(worker.process.pid) for worker in running}
        return [one.pid for rank, one in now.items() if one and one.runs and one.parent != self._parents[rank]]

    # ---- they come and end ----

    def readables(self) -> list[Readable]:
        """What to wait for."""
        running = [one for one in self._strangers.values() if one.code is None]
        return [*running, *self._knocks, *([self._door] if self._door is not None else [])]

    def look(self, ready: Sequence[object]) -> None:
        """Take in what has come of `readables`."""
        for worker in self._workers:
            if (one := self._strangers[worker.rank]) in ready:
                one.end(exit_code(one.pid, one.pidfd))
        for connection in [one for one in self._knocks if one in ready]:
            self._hear(connection)
        if self._door is not None and self._door in ready:
            connection = self._door.accept()[0]
            connection.setblocking(False)
            if (pid := own_peer(connection)) > 0:
                self._knocks[connection] = pid
            else:  # another user's; or one that cannot be seen from here: it has a /proc of its own
                connection.close()

    def _hear(self, connection: socket.socket) -> None:
        try:
            word, descriptors = receive_word(connection)
        except BlockingIOError:
            return
        except OSError:
            word, descriptors = None, []
        match word:
            case Introduction(rank) if self._welcome(rank, self._knocks[connection], descriptors):
                if self.first is None and rank == self.plan.first_rank:
                    self.first = connection
                return
            case Meeting():
                self.meeting = word
                return
            case Leaving(code):
                for one in self._strangers.values():
                    if one.pid == self._knocks[connection] and one.code is None:
                        one.end(code)
                failed = code not in GOOD_ENDS and IN_SLURM in os.environ
                self._farewells[connection] = time.monotonic() + (FAREWELL_SECONDS if failed else 0.0)
                return
            case _:
                for descriptor in descriptors:
                    os.close(descriptor)
                del self._knocks[connection]
                connection.close()

    def let_go(self, *, all_of_them: bool = False) -> None:
        """Answer the ranks that leave, once what they have said has been passed on, or all of them."""
        for connection in [at for at, due in self._farewells.items() if all_of_them or time.monotonic() >= due]:
            del self._farewells[connection]
            with suppress(OSError):
                send_word(connection, Leaving(0))

    def _welcome(self, rank: int, pid: int, descriptors: Sequence[int]) -> bool:
        if len(descriptors) != 2 or rank in self._strangers or self.all_here:
            return False
        try:
            stranger = self._strangers[rank] = Stranger(pid)
        except OSError:  # it is gone already
            return False
        box, record = descriptors
        process = read_process(pid)
        member = Member(rank, pid, process.start if process else 0)
        self._parents[rank] = process.parent if process else 0
        self._workers.append(Worker(member, stranger, Path(os.devnull), 0, (), record, box))
        self._workers.sort(key=lambda worker: worker.rank)
        if self.all_here and self._door is not None:
            self._door.close()  # the next start has the same name
            self._door = None
        return True

    def tell_first(self, meeting: Meeting) -> None:
        """Have local rank 0 show it to the other nodes."""
        if self.first is not None:
            with suppress(OSError):
                send_word(self.first, meeting)

    # ---- as with workers of our own ----

    def samples(self) -> list[Sample]:
        """How each of them gets on now."""
        for rank, one in self._strangers.items():
            if one.code is not None:
                self._ended.setdefault(rank, (one.code, one.ended_seconds))
        return super().samples()

    def _sample(self, worker: Worker) -> Sample:
        sample = super()._sample(worker)
        if sample.failure is not None or sample.code is None or sample.code >= 0 or not self._by_launcher(sample):
            return sample
        name = signal.Signals(-sample.code).name
        words = f"ended by {name}, from outside"
        return replace(sample, words=words, failure=Failure(
            worker.rank, sample.host, sample.pid, 128 - sample.code, name, words, "", True, sample.ended_seconds
        ))  # fmt: skip

    def _by_launcher(self, sample: Sample) -> bool:
        """Whether it was asked to end: launchers do that to all when one fails, and to all when a person stops them."""
        asked = [at for code, at in self._ended.values() if -code in STOP_SIGNALS]
        killed_then = sample.code == -signal.SIGKILL and any(at < sample.ended_seconds for at in asked)
        return -(sample.code or 0) in STOP_SIGNALS or killed_then

    def stop(self, grace_seconds: float, number: int = signal.SIGTERM) -> None:
        """As `Workers.stop`, where that is allowed."""
        if self.may_end:
            self._started |= descendants({one.pid for one in self._strangers.values() if one.code is None})
            super().stop(grace_seconds, number)

    def sweep(self) -> None:
        """Kill those that have been asked to end and have not, and what they had started: mpirun, say, does not."""
        if self.stopping:
            for one in self._strangers.values():
                one.send_signal(signal.SIGKILL)
            deadline = time.monotonic() + KILL_SECONDS
            while not self.over and time.monotonic() < deadline:
                self.look(select.select(self.readables(), [], [], 0.1)[0])
            for pid, start in self._started.items():
                if (process := read_process(pid)) is not None and process.runs and process.start == start:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
        self.left = [one.pid for one in self._strangers.values() if one.code is None]
        self.swept = True

    def close(self) -> None:
        """The last call of all."""
        super().close()
        for one in self._strangers.values():
            os.close(one.pidfd)
        for connection in (*self._knocks, *([self._door] if self._door is not None else [])):
            connection.close()


class Bystander(Orders):
    """Nobody gives an observer orders; it waits for its ranks, and for other observers.

    Where it may end ranks, the end of their launcher is an order to.
    """

    def __init__(self, adopted: Adopted) -> None:
        self.signals, self.launcher_gone, self._adopted = [], False, adopted
        self._looked_seconds, self._told = time.monotonic(), False

    def wait(self, seconds: float, also: Sequence[Readable] = ()) -> bool:
        """Return after `seconds`, or earlier when a rank comes, ends or speaks, or one of `also` can be read."""
        self._adopted.let_go()
        ready = select.select([*self._adopted.readables(), *also], [], [], max(0.0, seconds))[0]
        self._adopted.look(ready)
        woken = any(one not in also for one in ready)
        if self._told or time.monotonic() < self._looked_seconds + LOOK_SECONDS:
            return woken
        self._looked_seconds = time.monotonic()
        if pids := self._adopted.orphans():
            self._told, self.launcher_gone = True, self._adopted.may_end
            remedy = "they are ended" if self._adopted.may_end else f"to end them: kill {' '.join(map(str, pids))}"
            say(f"the launcher of the ranks on {os.uname().nodename} is gone, and they run on; {remedy}")
            return True
        return woken
