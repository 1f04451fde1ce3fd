"""`python -m paceline.launch.agent`: the parent of one node's workers, and the one that sees how they end.

It reads one JSON line (a NodePlan) from stdin, which then stays open as the lifeline: its end means that the launcher
is gone. It starts the workers, names the first failure, and leaves no process behind, however it ends.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.errors import ExitCode
from paceline.launch.cgroup import oom_kills
from paceline.launch.failure import Failure, Observation, choose, verdict_due_seconds
from paceline.launch.janitor import start_janitor
from paceline.launch.job import NodePlan
from paceline.launch.procfs import port_holder
from paceline.launch.start import Worker, start_workers
from paceline.launch.supervise import (
    LIFELINE_GRACE_SECONDS,
    STOP_SIGNALS,
    Roster,
    ask_to_stop,
    read_inbox,
    roster_path,
    say,
    signal_inbox,
    sweep,
)
from paceline.launch.verdict import tell

POLL_SECONDS = 1.0  # between looks for failure records while all goes well: exits wake the agent by themselves
POLL_FAILING_SECONDS = 0.05
MAX_PLAN_BYTES = 1 << 20
MAX_RECORD_BYTES = 1 << 20
LOG_TAIL_BYTES = 8192
SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class Woken:
    """What ended a wait: stop signals, the end of the lifeline, or (neither) a child or the clock."""

    signals: Sequence[signal.Signals] = ()
    launcher_gone: bool = False


class Agent:
    """The workers of one node, from the first start to the last end."""

    def __init__(self, plan: NodePlan, inbox: socket.socket) -> None:
        self.plan, self.inbox = plan, inbox
        self.folder = Path(plan.attempt_dir)
        self.workers: list[Worker] = []
        self.ended: dict[int, tuple[int, float]] = {}  # rank -> exit code, when seen
        self.lifeline = [0]
        self.oom_kills_before = oom_kills()

    def run(self, store: socket.socket | None) -> int:
        """Start the workers, wait for their end; the exit code."""
        try:
            for worker in start_workers(self.plan, store):
                self.workers.append(worker)
                self._write_roster()  # after each: whoever sweeps must know all that run
            if store is not None:
                store.close()  # rank 0 has its own; with ours open, connecting to a dead rank 0 would not be refused
            return self._watch()
        finally:  # also after our own bugs
            self._stop(0.0)

    def _write_roster(self) -> None:
        roster = Roster(os.uname().nodename, os.getpid(), tuple(w.member for w in self.workers))
        temporary = roster_path(self.folder).with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(roster))
        temporary.replace(roster_path(self.folder))

    def _watch(self) -> int:
        while True:
            observations = self._observe()
            if all(o.code == 0 for o in observations):
                return ExitCode.DONE
            due = verdict_due_seconds(observations)
            if due is not None and time.monotonic() >= due:
                return self._judge(observations)
            woken = self._wait(POLL_SECONDS if due is None else POLL_FAILING_SECONDS)
            if woken.launcher_gone:
                self._stop(LIFELINE_GRACE_SECONDS)
                say("the launcher is gone: its workers are stopped")
                return ExitCode.FAILED
            if woken.signals:
                self._stop(self.plan.grace_seconds)
                say(f"stopped by {woken.signals[0].name}")
                return 128 + woken.signals[0]

    def _wait(self, seconds: float) -> Woken:
        ready, _, _ = select.select([self.inbox, *self.lifeline], [], [], max(0.0, seconds))
        if self.inbox in ready and (signals := read_inbox(self.inbox)):
            return Woken(signals=signals)
        if 0 in ready and not os.read(0, 4096):
            self.lifeline = []  # an end stays readable for ever
            return Woken(launcher_gone=True)
        return Woken()

    def _observe(self) -> list[Observation]:
        for worker in self.workers:
            code = worker.process.poll()
            if code is not None:
                self.ended.setdefault(worker.rank, (code, time.monotonic()))
        return [self._observation(worker) for worker in self.workers]

    def _observation(self, worker: Worker) -> Observation:
        code, seen_seconds = self.ended.get(worker.rank, (None, math.inf))
        record = None if code == 0 else read_record(worker.record)
        return Observation(
            rank=worker.rank,
            host=os.uname().nodename,
            pid=worker.process.pid,
            code=code,
            seen_seconds=seen_seconds,
            record=record,
            log_tail=worker.log_tail(LOG_TAIL_BYTES) if code and record is None else "",
        )

    def _judge(self, observations: Sequence[Observation]) -> int:
        primary = choose(observations)
        assert primary is not None
        self._stop(self.plan.grace_seconds)  # first: the verdict shall stand last on the screen
        before, now = self.oom_kills_before, oom_kills()
        kills = 0 if before is None or now is None else now - before
        say(tell(primary, observations, oom_kills=kills, attempt_dir=self.plan.attempt_dir))
        return primary.exit_code

    def _stop(self, grace_seconds: float) -> None:
        """End all workers and all they have started; a (second) SIGINT meanwhile ends the grace."""
        deadline = time.monotonic() + grace_seconds
        alive = [w.process for w in self.workers if w.process.poll() is None]
        for process in alive if grace_seconds else ():
            ask_to_stop(process)
        while any(process.poll() is None for process in alive) and (left := deadline - time.monotonic()) > 0:
            if signal.SIGINT in self._wait(left).signals:
                break
        sweep([worker.member for worker in self.workers])
        for worker in self.workers:
            with suppress(subprocess.TimeoutExpired):  # in an uninterruptible system call: not even SIGKILL ends it yet
                worker.process.wait(1.0)
            worker.finish()
        if os.isatty(2):  # a progress bar that was killed had no chance to show the cursor again
            say(SHOW_CURSOR, end="")


def read_record(descriptor: int) -> Failure | None:
    """The failure that a worker has written down, if it has."""
    try:
        return msgspec.json.decode(os.pread(descriptor, MAX_RECORD_BYTES, 0), type=Failure)
    except (OSError, msgspec.MsgspecError):  # not, or not yet wholly
        return None


def read_plan() -> NodePlan | None:
    """The plan from stdin, nothing of what may follow it; None if stdin ends before."""
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_PLAN_BYTES:
        byte_or_more = os.read(0, 65536)  # not sys.stdin: its buffer would hide the lifeline's end
        if not byte_or_more:
            return None
        line += byte_or_more
    return msgspec.json.decode(line, type=NodePlan)


def listening_socket(plan: NodePlan) -> socket.socket | None:
    """The store's socket, bound before any worker starts: a port that is found and closed again can be lost.

    Raises:
        OSError: when the port is taken.
    """
    if plan.node != 0:
        return None
    store = socket.socket()
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last run's closing connections do no harm
    try:
        store.bind((plan.master_addr, plan.port))
        store.listen(1024)
    except OSError:
        store.close()
        raise
    return store


def main() -> int:
    """The exit code: 0 done, 2 wrong use, 128 + n stopped by signal n, else the first failing worker's."""
    try:
        plan = read_plan()
    except msgspec.MsgspecError as error:
        say(f"the agent reads one JSON line, a NodePlan, from stdin: {error}. Use `paceline train --nproc N`.")
        return ExitCode.USAGE
    if plan is None:
        return ExitCode.FAILED  # the launcher is gone already
    start_janitor(Path(plan.attempt_dir))
    with signal_inbox((*STOP_SIGNALS, signal.SIGCHLD)) as inbox:
        try:
            store = listening_socket(plan)
        except OSError as error:
            holder = port_holder(plan.port)
            by = f" by {holder}" if holder else ""
            say(f"port {plan.port} on {plan.master_addr} is taken{by}: {error.strerror}. Ask for another, or for none.")
            return ExitCode.USAGE
        try:
            return Agent(plan, inbox).run(store)
        except OSError as error:
            say(f"the workers cannot be started: {error}")
            return ExitCode.USAGE


if __name__ == "__main__":
    sys.exit(main())
