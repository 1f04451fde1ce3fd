"""`python -m paceline.launch.agent`: the parent of one node's workers, and the one that sees how they end.

It reads one JSON line (a NodePlan) from stdin, which then stays open as the lifeline: its end means that the launcher
is gone. It starts the workers, names the first failure, starts them again where that may help, and leaves no process
behind, however it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from paceline.errors import ExitCode, UsageError
from paceline.launch.failure import GOOD_ENDS, LOADER_KILLED, Kind, Observation, choose, verdict_due_seconds
from paceline.launch.generation import Generation
from paceline.launch.janitor import start_janitor
from paceline.launch.job import NodePlan
from paceline.launch.orders import LIFELINE, STOP_SIGNALS, Orders, signal_inbox
from paceline.launch.restart import Failed, Restart, Stop, decide
from paceline.launch.start import Inherited, listening_socket, make_snapshots
from paceline.launch.supervise import KEEP_FDS, LIFELINE_GRACE_SECONDS, say
from paceline.launch.verdict import tell

POLL_SECONDS = 1.0  # between looks for failure records while all goes well: exits wake the agent by themselves
POLL_FAILING_SECONDS = 0.05
MAX_PLAN_BYTES = 1 << 20
SHOW_CURSOR = "\x1b[?25h"


class Agent:
    """The workers of one node, from the first start to the last end."""

    def __init__(self, plan: NodePlan, orders: Orders, inherited: Inherited) -> None:
        self.plan, self.orders, self.inherited = plan, orders, inherited
        self.generation = Generation(plan, 0, inherited)
        self.left: Sequence[int] = ()  # what could not be ended

    def run(self) -> int:
        """Start the workers, again after a failure where that may help, and wait for their end; the exit code."""
        failures: list[Failed] = []
        try:
            while True:
                self._start()
                end = self._watch()
                if isinstance(end, int):
                    return end
                failures.append(self._judge(end))
                again = self._again(failures)
                if isinstance(again, int):
                    return again
                self._next(again)
        finally:  # also after our own bugs
            self._stop(0.0)

    def _start(self) -> None:
        store = listening_socket(self.generation.plan)
        try:
            self.generation.start(store)
        finally:
            if store is not None:
                store.close()  # rank 0 has its own; with ours open, connecting to a dead rank 0 would not be refused

    def _watch(self) -> int | list[Observation]:
        """Wait for the generation's end; the exit code, or what was observed when it failed."""
        while True:
            observations = self.generation.observe()
            if all(o.code in GOOD_ENDS for o in observations):
                return good_code(observations)
            due = verdict_due_seconds(observations)
            if due is not None and time.monotonic() >= due:
                return observations
            saved = [o.seen_seconds for o in observations if o.code == ExitCode.SAVED]
            if saved and due is None and time.monotonic() >= min(saved) + self.plan.stop_grace_seconds:
                return self._end_late(observations)
            self.orders.wait(POLL_SECONDS if due is None else POLL_FAILING_SECONDS)
            if self.orders.launcher_gone or self.orders.signals:
                return self._obey()

    def _obey(self) -> int:
        """End everything, as ordered; the exit code."""
        if self.orders.launcher_gone:
            self._stop(LIFELINE_GRACE_SECONDS)
            say("the launcher is gone: its workers are stopped")
            return ExitCode.FAILED
        self._stop(self.plan.stop_grace_seconds, signals_heard=1)
        observations = self.generation.observe()
        if all(o.code in GOOD_ENDS for o in observations):
            return good_code(observations)
        number = self.orders.signals[0]
        primary = choose(observations)
        if primary is not None and primary.kind is Kind.EXCEPTION:  # it could not do what it was asked to: save, say
            say(tell(primary, observations, oom_kills=0, attempt_dir=self.plan.attempt_dir))
        say(f"stopped by {number.name}")
        return 128 + number

    def _end_late(self, observations: Sequence[Observation]) -> int:
        """End who still runs long after another has saved and stopped; rank 0's word counts, for it saves for all."""
        late = ", ".join(str(o.rank) for o in observations if o.code is None)
        self._stop(self.plan.grace_seconds)
        if self.generation.observe()[0].code == ExitCode.SAVED:
            return ExitCode.SAVED
        say(
            f"rank {late} still ran {self.plan.stop_grace_seconds:g} s after another rank had saved its state and "
            f"stopped (exit code {int(ExitCode.SAVED)}), and rank 0 has not saved: all are stopped"
        )
        return ExitCode.FAILED

    def _judge(self, observations: Sequence[Observation]) -> Failed:
        """End the generation and tell the verdict."""
        primary = choose(observations)
        assert primary is not None
        self._stop(self.plan.grace_seconds)  # first: the verdict shall stand last on the screen
        say(tell(primary, observations, oom_kills=self.generation.oom_kills(), attempt_dir=self.plan.attempt_dir))
        return Failed(
            kind=primary.kind,
            rank=primary.rank,
            exit_code=primary.exit_code,
            exception=primary.record.type if primary.record else "",
            step=self.generation.step_reached(),
            nproc=self.generation.plan.nproc,
            loader_killed=bool(primary.record and LOADER_KILLED.search(primary.record.message)),
            ended_well=frozenset(o.code for o in observations if o.code is not None and not o.ended_badly),
        )

    def _again(self, failures: Sequence[Failed]) -> Restart | int:
        """The restart to make; or the exit code, and it is told why there is none."""
        plan, exit_code = self.plan, failures[-1].exit_code
        decision = decide(failures, nproc=plan.nproc, min_nproc=plan.min_nproc, max_restarts=plan.max_restarts)
        if isinstance(decision, Stop):
            if decision.sentence:
                say(decision.sentence)
            return exit_code
        self.orders.wait(0.0)
        if self.orders.launcher_gone or self.orders.signals:
            return self._obey()
        if self.left:  # it may still write to what the next generation reads
            say(f"not restarted: not even SIGKILL has ended {', '.join(f'pid {pid}' for pid in self.left)}")
            return exit_code
        return decision

    def _next(self, restart: Restart) -> None:
        """Put the next generation in the place of the last, of which nothing runs any more."""
        last, number = self.generation, self.generation.number + 1
        gone = last.plan.nproc - restart.nproc
        fewer = " (one fewer, for the same failure came twice at the same step)" if gone else ""
        say(
            f"restart {number} of {self.plan.max_restarts}: {restart.nproc} rank{'s' * (restart.nproc > 1)}{fewer} "
            f"as generation {number}, from the newest snapshot or checkpoint"
        )
        last.close()
        plan = replace(last.plan, nproc=restart.nproc, world_size=last.plan.world_size - gone)
        self.generation = Generation(plan, number, self.inherited)

    def _stop(self, grace_seconds: float, *, signals_heard: int = 0) -> None:
        """End all workers and all they have started.

        They are asked, and given `grace_seconds`; less once one of them has ended badly, for then there is nothing
        left to save together, or the launcher is gone. A stop signal beyond the first `signals_heard` ends the grace.
        """
        deadline = time.monotonic() + grace_seconds
        bad = gone = False
        if grace_seconds:
            self.generation.ask_to_stop()
        while None in (codes := self.generation.codes()) and len(self.orders.signals) <= signals_heard:
            now = time.monotonic()
            if not bad and not {*codes} <= {None, *GOOD_ENDS}:
                bad, deadline = True, min(deadline, now + self.plan.grace_seconds)
            if not gone and self.orders.launcher_gone:
                gone, deadline = True, min(deadline, now + LIFELINE_GRACE_SECONDS)
            if now >= deadline:
                break
            self.orders.wait(deadline - now)
        self.left = self.generation.sweep()
        if os.isatty(2):  # a progress bar that was killed had no chance to show the cursor again
            say(SHOW_CURSOR, end="")


def good_code(observations: Sequence[Observation]) -> ExitCode:
    """The exit code where all workers ended in good order: saved and to be gone on with, or done."""
    return ExitCode.SAVED if any(o.code == ExitCode.SAVED for o in observations) else ExitCode.DONE


def read_plan() -> NodePlan | None:
    """The plan from stdin, nothing of what may follow it; None if stdin ends before."""
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_PLAN_BYTES:
        byte_or_more = os.read(LIFELINE, 65536)  # not sys.stdin: its buffer would hide the lifeline's end
        if not byte_or_more:
            return None
        line += byte_or_more
    return msgspec.json.decode(line, type=NodePlan)


def main() -> int:
    """The exit code: 0 done, 2 wrong use, 75 saved, 128 + n stopped by signal n, else the first failing worker's."""
    try:
        plan = read_plan()
    except msgspec.MsgspecError as error:
        say(f"the agent reads one JSON line, a NodePlan, from stdin: {error}. Use `paceline train --nproc N`.")
        return ExitCode.USAGE
    if plan is None:
        return ExitCode.FAILED  # the launcher is gone already
    keep_open = tuple(int(text) for text in os.environ.get(KEEP_FDS, "").split(",") if text)
    start_janitor(Path(plan.attempt_dir), not_kept=keep_open)
    inherited = Inherited(make_snapshots(plan.nproc) if plan.max_restarts else (), keep_open)
    with signal_inbox((*STOP_SIGNALS, signal.SIGCHLD)) as inbox:
        agent = Agent(plan, Orders(inbox), inherited)
        try:
            return agent.run()
        except (UsageError, OSError) as error:
            say(str(error) if isinstance(error, UsageError) else f"the workers cannot be started: {error}")
            return ExitCode.USAGE if agent.generation.number == 0 else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
