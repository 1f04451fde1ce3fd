"""Node 0's agent, of one node or of many: it gives ranks, names the first failure, decides on restarts, and ends it."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from paceline.agent.crew import BEAT_SECONDS, Crew
from paceline.agent.freeing import free
from paceline.agent.gather import gather
from paceline.agent.guarding import Guarding, Stall
from paceline.agent.messages import PROOF, Start
from paceline.agent.node import Node
from paceline.agent.restart import Failed, Restart, Stop, announced, decide, without_lost_nodes
from paceline.agent.start import Inherited
from paceline.contract.failure import GOOD_ENDS
from paceline.contract.node_plan import NodePlan
from paceline.contract.orders import LIFELINE_GRACE_SECONDS, STOP_SIGNALS, Orders
from paceline.disk import writing
from paceline.errors import ExitCode, UsageError
from paceline.guard.deaths import Kind, Observation, choose, verdict_due_seconds
from paceline.guard.verdict import tell
from paceline.observe.summary import write_ended
from paceline.observe.terminal import say

POLL_SECONDS = 1.0  # between looks for failure records while all goes well: exits wake the agent by themselves
POLL_FAILING_SECONDS = 0.05
START_SECONDS = 30.0  # for other nodes to start their processes
SWEEP_MARGIN_SECONDS = 5.0  # for other nodes to kill what has not ended, and to say so
REMOTE_GRACE_SECONDS = 6.0  # when an ssh launcher is gone: time to save, and still nothing left after 10 s
SHOW_CURSOR = b"\x1b[?25h"


class Head:
    """The whole run, from the first start to the last end."""

    def __init__(
        self, plan: NodePlan, orders: Orders, inherited: Inherited, crew: Crew, settled: Callable[[], None]
    ) -> None:
        self.plan, self.orders, self.crew = plan, orders, crew
        self._settled = settled  # called when all nodes have started their workers
        self.node = Node(plan, inherited)
        self.ranks: dict[int, list[int]] = {}  # of the other nodes, in this generation

    def run(self) -> int:
        """Start the workers, again after a failure where that may help, and wait for their end; the exit code."""
        code = int(ExitCode.FAILED)
        try:
            code = self._run()
        except (UsageError, OSError) as error:
            if self.node.number <= 0:  # before anything has run: it is wrong use
                code = ExitCode.USAGE
                raise
            say(f"the workers cannot be started again: {error}")
        finally:  # also after our own bugs
            self._stop(0.0)
            self.crew.end(code)
            if self.plan.attempt_dir:
                write_ended(Path(self.plan.attempt_dir), code)
        return code

    def _run(self) -> int:
        self.plan = gather(self.plan, self.crew, self._wait, lambda: self._ordered)
        failures: list[Failed] = []
        nproc = self.plan.nproc
        while True:
            if self._ordered:
                return self._obey()
            self._start(nproc)
            end = self._watch()
            if isinstance(end, int):
                return end
            failed = self._end_stalled(end) if isinstance(end, Stall) else self._judge(end)
            again = self._again(failures, failed)
            if isinstance(again, int):
                return again
            nproc = again.nproc

    def _wait(self, seconds: float) -> None:
        if self.plan.nodes > 1:
            seconds = min(seconds, BEAT_SECONDS)
        self.orders.wait(seconds, self.crew.sockets())
        self.crew.serve()
        self.orders.launcher_gone |= any(0 in told for told in self.crew.told.values())

    @property
    def _signals(self) -> Sequence[int]:
        """The stop signals so far. An order to one agent is one to all; the same order reaches many, and is one."""
        others = ([n for n in told if n in STOP_SIGNALS] for told in self.crew.told.values())
        return max([self.orders.signals, *others], key=len)

    @property
    def _ordered(self) -> bool:
        return self.orders.launcher_gone or bool(self._signals)

    def _start(self, nproc: int) -> None:
        """Start a generation on all nodes that are here.

        Raises:
            UsageError: when a node cannot start its workers.
        """
        number, members = self.node.number + 1, self.crew.here
        self.ranks, world_size = {}, nproc
        for member in members:
            self.ranks[member.hello.node] = list(range(world_size, world_size + member.hello.nproc))
            world_size += member.hello.nproc
        plan = replace(self.plan, nproc=nproc, world_size=world_size)
        port = self.node.start(plan, number)
        start = Start(number, 0, world_size, port, plan.attempt_dir, self._proof())
        self.crew.start(start, first_rank=nproc)
        deadline = time.monotonic() + START_SECONDS
        while waiting := [m for m in self.crew.here if m.started is None]:
            if time.monotonic() > deadline:
                raise UsageError(f"{waiting[0].name} has not started its workers within {START_SECONDS:g} s")
            self._wait(POLL_SECONDS)
            if self._ordered:
                return
        refused = [m.started.refusal for m in self.crew.here if m.started is not None and m.started.refusal]
        if refused:
            raise UsageError("\n".join(refused))
        self._settled()
        self.guarding = Guarding(
            plan,
            self.node,
            self.crew,
            wait=self._wait,
            observe=self._observe,
            interrupted=lambda: self._ordered or verdict_due_seconds(self._observe()) is not None,
        )

    def _proof(self) -> str:
        """What all nodes must find in the attempt's folder, if they are to work in one and the same."""
        if self.plan.nodes == 1 or not self.plan.run_dir or self.plan.plain_store:
            return ""
        proof = secrets.token_hex(8)
        writing.replace(Path(self.plan.attempt_dir) / PROOF, proof.encode(), sync=True)
        return proof

    def _observe(self) -> list[Observation]:
        return [*self.node.observe(), *self.crew.observe(self.node.number, self.ranks)]

    def _watch(self) -> int | list[Observation] | Stall:
        """Wait for the generation's end; the exit code, or what was observed when it failed or stood still."""
        while True:
            observations = self._observe()
            if all(o.code in GOOD_ENDS for o in observations):
                return good_code(observations)
            due = verdict_due_seconds(observations)
            if due is not None and time.monotonic() >= due:
                return observations
            saved = [o.seen_seconds for o in observations if o.code == ExitCode.SAVED]
            if saved and due is None and time.monotonic() >= min(saved) + self.plan.stop_grace_seconds:
                return self._end_late(observations)
            if due is None and not saved and (stall := self.guarding.look()) is not None:
                return stall
            self._wait(self.guarding.look_seconds if due is None else POLL_FAILING_SECONDS)
            if self._ordered:
                return self._obey()

    def _obey(self) -> int:
        """End everything, as ordered; the exit code."""
        if self.orders.launcher_gone:
            self._stop(REMOTE_GRACE_SECONDS if self.plan.silence_seconds else LIFELINE_GRACE_SECONDS)
            say("the launcher is gone: its workers are stopped")
            return ExitCode.FAILED
        self._stop(self.plan.stop_grace_seconds, signals_heard=1)
        observations = self._observe()
        if observations and all(o.code in GOOD_ENDS for o in observations):
            return good_code(observations)
        if lost := [member for member in self.crew.members.values() if member.lost]:
            # a scheduler ends all tasks of a step when one of them is gone: its order only follows from the loss
            for member in lost:
                say(f"{member.name} is lost: {member.lost}")
            return ExitCode.FAILED
        number = signal.Signals(self._signals[0])
        primary = choose(observations)
        if primary is not None and primary.kind is Kind.EXCEPTION:  # it could not do what it was asked to: save, say
            say(tell(primary, observations, oom_kills=0, attempt_dir=self.plan.attempt_dir))
        say(f"stopped by {number.name}")
        return 128 + number

    def _end_late(self, observations: Sequence[Observation]) -> int:
        """End who still runs long after another has saved and stopped; rank 0's word counts, for it saves for all."""
        late = ", ".join(str(o.rank) for o in observations if o.code is None)
        self._stop(self.plan.grace_seconds)
        if self.node.observe()[0].code == ExitCode.SAVED:
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
        stall, last = self.guarding.explain(primary)
        self._stop(self.plan.grace_seconds)  # first: the verdict shall stand last on the screen
        reports = [member.report for member in self.crew.here]
        oom_kills = self.node.oom_kills() + sum(report.oom_kills for report in reports)
        if stall is not None:
            say(stall.page)
            return self._stalled(stall)
        say(tell(primary, observations, oom_kills=oom_kills, attempt_dir=self.plan.attempt_dir, last=last))
        return Failed.of(primary, observations, step=self._step_reached(), nproc=len(self.node.observe()))

    def _end_stalled(self, stall: Stall) -> Failed:
        """Tell the verdict, free those who only wait, and end the generation."""
        say(stall.page)
        free(
            stall,
            self.node,
            self.crew,
            wait=self._wait,
            observe=self._observe,
            ordered=lambda: self._ordered,
            grace_seconds=self.plan.stop_grace_seconds,
        )
        self._stop(self.plan.grace_seconds)
        return self._stalled(stall)

    def _stalled(self, stall: Stall) -> Failed:
        nproc = len(self.node.observe())
        return Failed.stalled(stall.verdict, stall.exit_code, step=self._step_reached(), nproc=nproc)

    def _step_reached(self) -> int:
        return max(self.node.step_reached(), *(member.report.step for member in self.crew.here), 0)

    def _again(self, failures: list[Failed], failed: Failed) -> Restart | int:
        """The restart to make, told; or the exit code, and it is told why there is none."""
        plan, here = self.plan, 1 + len(self.crew.here)
        if failed.kind is Kind.LOST or here < 1 + len(self.ranks):  # lost while the others were being stopped, say
            decision = without_lost_nodes(here, nodes=plan.nodes, min_nodes=plan.min_nodes, nproc=plan.nproc)
        else:
            failures.append(failed)
            decision = decide(failures, nproc=plan.nproc, min_nproc=plan.min_nproc, max_restarts=plan.max_restarts)
        if isinstance(decision, Stop):
            if decision.sentence:
                say(decision.sentence)
            return failed.exit_code
        self._wait(0.0)
        if self._ordered:
            return self._obey()
        if left := [*self.node.left, *(pid for member in self.crew.here for pid in member.report.left)]:
            # it may still write to what the next generation reads
            say(f"not restarted: not even SIGKILL has ended {', '.join(f'pid {pid}' for pid in left)}")
            return failed.exit_code
        self._announce(decision, failures)
        return decision

    def _announce(self, restart: Restart, failures: Sequence[Failed]) -> None:
        members = self.crew.here
        words = announced(
            number=self.node.number + 1,
            total=restart.nproc + sum(member.hello.nproc for member in members),
            nodes=1 + len(members),
            lost_nodes=len(self.ranks) - len(members),
            used=f"{len(failures)} of {self.plan.max_restarts}",
            fewer=len(self.node.observe()) > restart.nproc,
            plain=self.plan.plain_store,
        )
        say(words)

    def _stop(self, grace_seconds: float, *, signals_heard: int = 0) -> None:
        """End all workers and all they have started, on all nodes.

        They are asked, and given `grace_seconds`; less once one of them has ended badly, for then there is nothing
        left to save together, or the launcher is gone. A stop signal beyond the first `signals_heard` ends the grace.
        """
        self.crew.stop(grace_seconds)
        self.node.stop(grace_seconds)
        deadline = time.monotonic() + grace_seconds
        gone = self.orders.launcher_gone
        while (self.node.seconds_left or not self.crew.stopped()) and len(self._signals) <= signals_heard:
            now = time.monotonic()
            if now >= deadline:
                break
            if any(o.ended_badly for o in self._observe()):
                deadline = min(deadline, now + self.plan.grace_seconds)
                self._hurry(deadline - now)
            if self.orders.launcher_gone and not gone:
                gone, deadline = True, min(deadline, now + LIFELINE_GRACE_SECONDS)
                self._hurry(deadline - now)
            self._wait(min(deadline - now, self.node.seconds_left or BEAT_SECONDS))
        self.crew.stop(0.0)
        self.node.sweep()
        deadline = time.monotonic() + SWEEP_MARGIN_SECONDS
        while not self.crew.stopped() and time.monotonic() < deadline:
            self._wait(deadline - time.monotonic())
        if os.isatty(2):  # a progress bar that was killed had no chance to show the cursor again
            with suppress(OSError):
                os.write(2, SHOW_CURSOR)

    def _hurry(self, grace_seconds: float) -> None:
        self.crew.stop(grace_seconds)
        self.node.stop(grace_seconds)


def good_code(observations: Sequence[Observation]) -> ExitCode:
    """The exit code where all workers ended in good order: saved and to be gone on with, or done."""
    return ExitCode.SAVED if any(o.code == ExitCode.SAVED for o in observations) else ExitCode.DONE
