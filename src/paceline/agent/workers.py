"""The workers of one node in one generation: started, observed, asked to stop, swept away."""

import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from paceline.agent.gate import StoreGate
from paceline.agent.janitor import tell_janitor
from paceline.agent.start import Inherited, Worker, start_workers
from paceline.agent.store import Store
from paceline.contract.birth import ROOM
from paceline.contract.boxes import ask_to_regroup, ask_to_save, read_counters, release, takes_signal
from paceline.contract.evidence import Sample
from paceline.contract.failure import GOOD_ENDS, Failure
from paceline.contract.marks import read_names
from paceline.contract.node_plan import NodePlan
from paceline.disk import writing
from paceline.guard.collect import Collection
from paceline.guard.pace import Stillness
from paceline.host.cgroup import oom_kills
from paceline.host.machine_log import MachineLog
from paceline.host.procfs import read_process
from paceline.host.sweep import Roster, mark_of, roster_path, sweep
from paceline.observe.log_times import TimesWriter

MAX_RECORD_BYTES = 1 << 20
LOG_TAIL_BYTES = 8192
LAST_WORDS_SECONDS = 0.2


class Workers:
    """What an agent does with its own workers: one object per generation. It never waits for them: its owner does.

    `plan` is the agent's, with the ranks that this generation has; `port` is the store's.
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
        self._stillness, self._saves_asked = Stillness(), 0
        self.machine: MachineLog | None = None
        """what this machine does, in the run's folder; None for a run without one"""
        self.gate: StoreGate | None = None
        """by which our workers come to the store of several hosts"""

    @classmethod
    def start(cls, plan: NodePlan, number: int, inherited: Inherited) -> Self:
        """Start all workers of generation `number`, which inherit what they need to meet in the store, or none.

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
        """Ask the workers to end within this time, by this signal; said again, the time can only become less.

        Without any grace they are not asked: for then they would begin to save, and be killed in the middle of it.
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
        """Until whoever still runs is to be killed; 0 when nobody does, or the time is over."""
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
        """How each worker gets on now."""
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
        """Begin to ask all workers what exactly they do; see `Collection`."""
        boxes = {worker.rank: worker.box for worker in self._workers}
        return Collection(self.samples(), boxes, question, patience_seconds=patience_seconds)

    def release(self, ranks: Sequence[int], word: bytes) -> None:
        """Have those of `ranks` that are ours leave the collective in which they wait, with this word."""
        for worker in self._workers:
            if worker.rank in ranks:
                release(worker.box, word)

    def ask_to_save(self) -> None:
        """Have the first one vote for a checkpoint after its next step; a script does not hear it.

        One alone: two that hear it at different steps would save twice.
        """
        self._saves_asked += 1
        ask_to_save(self._workers[0].box, self._saves_asked)

    def ask_to_regroup(self) -> None:
        """Have all ranks save and end after their next step, by the first one's vote; a script does not hear it."""
        ask_to_regroup(self._workers[0].box)

    def names(self) -> Mapping[str, Sequence[str]]:
        """How the tensors of a script are called, by layout."""
        return read_names(self._workers[0].box).tensors

    def oom_kills(self) -> int:
        """How many processes the kernel has killed for memory since this generation's start."""
        before, now = self._oom_kills_before, oom_kills()
        return 0 if before is None or now is None else now - before

    def sweep(self) -> None:
        """End all workers and all they have started, at once."""
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
        """Forget the records and boxes of workers that are gone; the last call of all."""
        for worker in self._workers:
            os.close(worker.record)
            os.close(worker.box)
        for times in self._times:
            times.close()
        if self.gate is not None:
            self.gate.close()


def read_record(descriptor: int) -> Failure | None:
    """The failure that a worker has written down, if it has."""
    try:
        return msgspec.json.decode(os.pread(descriptor, MAX_RECORD_BYTES, 0), type=Failure)
    except (OSError, msgspec.MsgspecError):  # not, or not yet wholly
        return None
