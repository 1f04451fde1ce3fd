"""The agent of node 0: it starts each generation, names the first failure, decides on restarts, and ends the run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from paceline.agent.crew import Crew
from paceline.agent.gather import gather_nodes
from paceline.agent.generation import Generation
from paceline.agent.guarding import Guarding, Stall
from paceline.agent.restart import (
    FailedGeneration,
    NoRestart,
    Restart,
    announced,
    decide,
    without_lost_nodes,
)
from paceline.agent.start import Inherited
from paceline.contract.failure import GOOD_ENDS
from paceline.contract.node_plan import NodePlan
from paceline.contract.orders import LIFELINE_GRACE_SECONDS, REMOTE_GRACE_SECONDS, Orders
from paceline.errors import ExitCode, UsageError
from paceline.guard.deaths import Kind, Observation, choose, verdict_due_seconds
from paceline.guard.verdict import tell
from paceline.observe.summary import write_ended
from paceline.observe.terminal import say

POLL_FAILING_SECONDS = 0.05  # between looks for failure records; while all goes well, as often as the guard looks


class Head:
    """The whole run, from the first start to the last end."""

    def __init__(self, plan: NodePlan, orders: Orders, inherited: Inherited, settled: Callable[[], None]) -> None:
        self.plan, self.crew = plan, Crew(plan, orders)
        self._inherited = inherited
        self._settled = settled  # called when all nodes have started their workers
        self._number = 0  # of the generation
        self._failures: list[FailedGeneration] = []

    def run(self) -> int:
        """Start the workers, again after a failure where that may help, and wait for their end; the exit code."""
        code = int(ExitCode.FAILED)
        try:
            code = self._run()
        except (UsageError, OSError) as error:
            if self._number == 0:  # before anything has run: it is wrong use
                code = ExitCode.USAGE
                raise
            say(f"the workers cannot be started again: {error}")
        finally:  # also after our own bugs
            self.crew.end(code)
            if self.plan.attempt_dir:
                write_ended(Path(self.plan.attempt_dir), code)
        return code

    def _run(self) -> int:
        self.plan = gather_nodes(self.plan, self.crew)
        nproc = self.plan.nproc
        while not self.crew.ordered:
            plan = replace(self.plan, nproc=nproc)
            with Generation.start(plan, self._number, self.crew, self._inherited) as generation:
                end = self._run_one(generation)
            if isinstance(end, int):
                return end
            nproc, self._number = end.nproc, self._number + 1
        return _launcher_gone() if self.crew.launcher_gone else self._stopped_by_signal([])

    def _run_one(self, generation: Generation) -> Restart | int:
        """Wait for a generation's end: the restart to make, or the exit code; either is reported."""
        if not generation.wait_started():
            return self._obey(generation)
        self._settled()
        guarding = Guarding(generation)
        end = self._watch(generation, guarding)
        if isinstance(end, int):
            return end
        failed = (
            self._end_stalled(generation, end) if isinstance(end, Stall) else self._judge(generation, guarding, end)
        )
        return self._again(generation, failed)

    def _watch(self, generation: Generation, guarding: Guarding) -> int | list[Observation] | Stall:
        """Wait for the generation's end; the exit code, or what was observed when it failed or stood still."""
        while True:
            observations = generation.observe()
            if all(o.code in GOOD_ENDS for o in observations):
                return good_code(observations)
            due = verdict_due_seconds(observations)
            if due is not None and time.monotonic() >= due:
                return observations
            saved = [o.seen_seconds for o in observations if o.code == ExitCode.SAVED]
            if saved and due is None and time.monotonic() >= min(saved) + self.plan.stop_grace_seconds:
                return self._end_late(generation, observations)
            if due is None and not saved and (stall := guarding.look()) is not None:
                return stall
            self.crew.wait(guarding.look_seconds if due is None else POLL_FAILING_SECONDS)
            if self.crew.ordered:
                return self._obey(generation)

    def _obey(self, generation: Generation) -> int:
        """End everything, as ordered; the exit code."""
        if self.crew.launcher_gone:
            generation.stop(REMOTE_GRACE_SECONDS if self.plan.silence_seconds else LIFELINE_GRACE_SECONDS)
            return _launcher_gone()
        generation.stop(self.plan.stop_grace_seconds, signals_heard=1)
        return self._stopped_by_signal(generation.observe())

    def _stopped_by_signal(self, observations: Sequence[Observation]) -> int:
        if observations and all(o.code in GOOD_ENDS for o in observations):
            return good_code(observations)
        if lost := [member for member in self.crew.members.values() if member.lost]:
            # a scheduler ends all tasks of a step when one of them is gone: its order only follows from the loss
            for member in lost:
                say(f"{member.name} is lost: {member.lost}")
            return ExitCode.FAILED
        number = signal.Signals(self.crew.signals[0])
        primary = choose(observations)
        if primary is not None and primary.kind is Kind.EXCEPTION:  # it could not save, for example
            say(tell(primary, observations, oom_kills=0, attempt_dir=self.plan.attempt_dir))
        say(f"stopped by {number.name}")
        return 128 + number

    def _end_late(self, generation: Generation, observations: Sequence[Observation]) -> int:
        """End ranks that still run long after another has saved and stopped; rank 0 decides, for it saves for all."""
        late = ", ".join(str(o.rank) for o in observations if o.code is None)
        generation.stop(self.plan.grace_seconds)
        if generation.own.observe()[0].code == ExitCode.SAVED:
            return ExitCode.SAVED
        say(
            f"rank {late} still ran {self.plan.stop_grace_seconds:g} s after another rank had saved its state and "
            f"stopped (exit code {int(ExitCode.SAVED)}), and rank 0 has not saved: all are stopped"
        )
        return ExitCode.FAILED

    def _judge(
        self, generation: Generation, guarding: Guarding, observations: Sequence[Observation]
    ) -> FailedGeneration:
        """End the generation and report the verdict."""
        primary = choose(observations)
        assert primary is not None
        stall, last = guarding.explain(primary)
        generation.stop(self.plan.grace_seconds)  # first: the verdict shall be the last thing on the screen
        if stall is not None:
            say(stall.page)
            return _stalled(generation, stall)
        words = tell(
            primary, observations, oom_kills=generation.oom_kills(), attempt_dir=self.plan.attempt_dir, last=last
        )
        say(words)
        return FailedGeneration.of(primary, observations, step=generation.step_reached(), nproc=generation.plan.nproc)

    def _end_stalled(self, generation: Generation, stall: Stall) -> FailedGeneration:
        """Report the verdict, free the ranks that only wait, and end the generation."""
        say(stall.page)
        generation.free(stall.freed, stall.word)
        generation.stop(self.plan.grace_seconds)
        return _stalled(generation, stall)

    def _again(self, generation: Generation, failed: FailedGeneration) -> Restart | int:
        """The restart to make, or the exit code; what is done and why is reported."""
        plan, here = self.plan, 1 + len(self.crew.here)
        if failed.kind is Kind.LOST or here < 1 + len(
            generation.members
        ):  # lost while the others were being stopped, say
            decision = without_lost_nodes(here, nodes=plan.nodes, min_nodes=plan.min_nodes, nproc=plan.nproc)
        else:
            self._failures.append(failed)
            decision = decide(
                self._failures, nproc=plan.nproc, min_nproc=plan.min_nproc, max_restarts=plan.max_restarts
            )
        if isinstance(decision, NoRestart):
            if decision.sentence:
                say(decision.sentence)
            return failed.exit_code
        self.crew.wait(0.0)
        if self.crew.ordered:
            return self._obey(generation)
        if left := generation.left():
            # it may still write to what the next generation reads
            say(f"not restarted: not even SIGKILL has ended {', '.join(f'pid {pid}' for pid in left)}")
            return failed.exit_code
        members = self.crew.here
        words = announced(
            number=self._number + 1,
            total=decision.nproc + sum(member.hello.nproc for member in members),
            nodes=1 + len(members),
            lost_nodes=len(generation.members) - len(members),
            used=f"{len(self._failures)} of {plan.max_restarts}",
            fewer=generation.plan.nproc > decision.nproc,
            plain=plan.plain_store,
        )
        say(words)
        return decision


def _launcher_gone() -> ExitCode:
    say("the launcher is gone: its workers are stopped")
    return ExitCode.FAILED


def _stalled(generation: Generation, stall: Stall) -> FailedGeneration:
    return FailedGeneration.stalled(
        stall.verdict, stall.exit_code, step=generation.step_reached(), nproc=generation.plan.nproc
    )


def good_code(observations: Sequence[Observation]) -> ExitCode:
    """The exit code where all workers ended in good order: saved and to be gone on with, or done."""
    return ExitCode.SAVED if any(o.code == ExitCode.SAVED for o in observations) else ExitCode.DONE
