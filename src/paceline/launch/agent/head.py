"""The agent of node 0: it starts each generation, names the first failure, decides on restarts, and ends the run.

A restart may help after a cause from outside: a killed process, memory that ran out, a network that broke. An error of
the program would only happen again, so the run ends with it.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from paceline.errors import ExitCode, UsageError, plural
from paceline.guard.deaths import RankEnd, due_seconds, first_to_fail, rank_end
from paceline.guard.judge import judge_samples
from paceline.guard.report import format_failure, same_verdict
from paceline.launch.agent.cluster import Cluster, Generation, RemoteNode
from paceline.launch.agent.joining import JoinQueue, gather_nodes, reachable
from paceline.launch.agent.monitor import Diagnosis, LiveStatus, Monitor
from paceline.launch.agent.workers import Inherited
from paceline.protocol.control import LIFELINE_GRACE_SECONDS, REMOTE_GRACE_SECONDS, Orders
from paceline.protocol.evidence import GOOD_ENDS, LOADER_KILLED, Evidence, Sample, Verdict, VerdictKind
from paceline.protocol.job import NodePlan
from paceline.runs.attempt import Ended, write_ended
from paceline.runs.console import say

TRIAL_SECONDS = 600.0  # within which nodes that have come in are the reason where no first step is taken
POLL_FAILING_SECONDS = 0.05  # between looks for failure records; while all goes well, as often as the guard looks


# ---- whether another start may help ----


@dataclass(frozen=True)
class FailedGeneration:
    """How one generation failed: its first failure, and how far it had come."""

    end: RankEnd | None  # of the rank that failed first; None: ranks stood still, or were at odds
    rank: int
    exit_code: int
    exception: str  # the type's name; empty without a record
    step: int  # steps done by the rank that had come furthest
    nproc: int
    loader_killed: bool = False  # the exception only says that a DataLoader worker was killed: memory ran out, say
    verdict: Verdict | None = None  # the hang guard's, where that has ended it
    ended_well: frozenset[int] = frozenset()  # exit codes of ranks that had ended in good order before

    @classmethod
    def of(cls, verdict: Verdict, ranks: Sequence[Sample], exit_code: int, *, step: int, nproc: int) -> Self:
        """A generation that ended with this verdict on its ranks."""
        first = next((one for one in ranks if one.rank == verdict.failed), None)
        if first is None:
            rank = verdict.guilty[0] if verdict.guilty else -1
            return cls(None, rank, exit_code, "", step, nproc, verdict=verdict)
        failure = first.failure
        return cls(
            end=rank_end(first),
            rank=first.rank,
            exit_code=exit_code,
            exception=failure.type if failure else "",
            step=step,
            nproc=nproc,
            loader_killed=bool(failure and LOADER_KILLED.search(failure.message)),
            ended_well=frozenset(one.code for one in ranks if one.code is not None and not one.ended_badly),
        )

    @property
    def progress(self) -> tuple[int, int]:
        """The progress of the run: steps, or for a script, which counts no steps, the number of its collective."""
        op = None if self.verdict is None else self.verdict.op
        return self.step, 0 if self.step or op is None else op.seq

    def is_like(self, other: Self) -> bool:
        """Whether the two failures are the same."""
        if self.verdict is not None and other.verdict is not None:
            return same_verdict(self.verdict, other.verdict)
        return (self.end, self.rank, self.exit_code) == (other.end, other.rank, other.exit_code)


@dataclass(frozen=True)
class Restart:
    """A restart with this number of ranks."""

    nproc: int


def _restart_words(ranks: int, nodes: int, number: str, *, came: int, gone: int, fewer: bool) -> str:
    """`number` is that of a restart after a failure; `came` and `gone` are nodes; `fewer`: there is a rank less."""
    counted = plural(ranks, "rank")
    if not came and not gone:
        why = " (one fewer, for the same failure came twice at the same step)" if fewer else ""
        return f"restart {number}: {counted}{why}" if number else f"going on: {counted}"
    changes = [f"with {came} more"] if came else []
    changes += ["without it" if gone == 1 else f"without {gone} of them"] if gone else []
    return f"going on {' and '.join(changes)}: {counted} on {plural(nodes, 'node')}"


def decide(history: Sequence[FailedGeneration], *, nproc: int, min_nproc: int, max_restarts: int) -> Restart | str:
    """The restart after the last failure of `history`, or why there is none: empty if `max_restarts` is 0.

    `history` holds one failure per generation, the oldest first.

    `nproc` is the number of ranks of the first generation. At least `min_nproc` ranks must be left; 0: all of them.

    Example: 4 ranks, min_nproc 3. Rank 1 is killed at step 40, restart; again at step 40, restart with 3 ranks, which
    are a new start to the count; rank 1 of them is killed at step 40, restart; again at step 40, the end.
    """
    last = history[-1]
    if max_restarts == 0:
        return ""
    if reason := _not_worth_it(last):
        return f"not restarted: {reason}"
    fewer = _is_repeated(history)
    if fewer and last.nproc - 1 < max(1, min_nproc or nproc):
        who = f"rank {last.rank}, " if last.rank >= 0 else ""
        after = f", after step {last.step}" if last.step else ""
        return f"not restarted: the same failure at the same step twice: {who}exit code {last.exit_code}{after}"
    if len(history) > max_restarts:
        return f"not restarted: {max_restarts} of {max_restarts} restarts are used up"
    return Restart(last.nproc - 1 if fewer else last.nproc)


def _is_repeated(history: Sequence[FailedGeneration]) -> bool:
    if len(history) < 2:
        return False
    before, last = history[-2:]
    # a restart goes back to a checkpoint: failing before the old step is reached again is no progress either
    return before.nproc == last.nproc and last.is_like(before) and last.progress <= before.progress


def _not_worth_it(last: FailedGeneration) -> str:
    """Why a restart would only fail again; empty if it may help."""
    if ExitCode.SAVED in last.ended_well:
        return "a rank had saved its state and stopped, so the run was to end"
    if last.exit_code == ExitCode.USAGE:
        return "this is wrong use, which a restart does not change"
    if last.verdict is not None and last.verdict.kind in (VerdictKind.MISMATCH, VerdictKind.DEADLOCK):
        return "that ranks call different collectives is an error of the program, which a restart would only meet again"
    if last.exit_code in (ExitCode.NOT_FINITE, ExitCode.DIVERGED):
        return "wrong results are an error of the program, or of a machine, which a restart would only meet again"
    left = last.verdict is not None and last.verdict.kind is VerdictKind.LEFT
    if left or (last.end is RankEnd.VICTIM and last.ended_well):
        return "a rank ended while others ran, which is an error of the program"
    if last.end is RankEnd.EXCEPTION and not last.loader_killed:
        return f"{last.exception} is an error of the program, which a restart would only meet again"
    if last.end is RankEnd.EXIT:
        return f"the program itself ended with exit code {last.exit_code}, and would do so again"
    return ""


# ---- the run ----


class Head:
    """The whole run, from the first start to the last end."""

    def __init__(self, plan: NodePlan, orders: Orders, inherited: Inherited, on_started: Callable[[], None]) -> None:
        self.plan, self.cluster = plan, Cluster(plan, orders)
        self._inherited = inherited
        self._on_started = on_started  # called when all nodes have started their workers
        self._number = 0  # of the generation
        self._words = ""  # what the last one failed of, in a line
        self._failures: list[FailedGeneration] = []
        self._queue, self._began_seconds = JoinQueue(plan, self.cluster), 0.0
        self._entered: Sequence[RemoteNode] = ()  # with the generation that runs

    def run(self) -> int:
        """Start the workers, restart them after a failure if that may help, and wait for their end; the exit code."""
        code = int(ExitCode.FAILED)
        try:
            code = self._run()
        except (UsageError, OSError) as error:
            if self._number == 0:  # before anything has run: it is wrong use
                code = ExitCode.USAGE
                raise
            reason = error.shown if isinstance(error, UsageError) else error
            say(f"the workers cannot be started again: {reason}")
        finally:  # also after our own bugs
            self.cluster.end(code)
            self._queue.withdraw(self.plan.attempt_dir)
            if self.plan.attempt_dir:
                write_ended(Path(self.plan.attempt_dir), Ended(int(code), self._words if code not in GOOD_ENDS else ""))
        return code

    def _run(self) -> int:
        self.plan = reachable(gather_nodes(self.plan, self.cluster), self.cluster)
        self._queue.invite(self.plan)
        nproc = self.plan.nproc
        while not self.cluster.ordered:
            self.plan = reachable(self.plan, self.cluster)
            ranks = replace(self.plan.ranks, restarts=len(self._failures))
            plan = replace(self.plan, nproc=nproc, ranks=ranks)
            with Generation.start(plan, self._number, self.cluster, self._inherited) as generation:
                end = self._run_one(generation)
            if isinstance(end, int):
                return end
            nproc, self._number = end.nproc, self._number + 1
        return _launcher_gone() if self.cluster.launcher_gone else self._stopped_by_signal([])

    def _run_one(self, generation: Generation) -> Restart | int:
        """Wait for a generation's end: the restart to make, or the exit code; either is reported."""
        try:
            if not generation.wait_started():
                return self._obey(generation)
        except UsageError as error:
            refused = [one for one in self._entered if one.started is not None and one.started.refusal]
            if not refused:
                raise
            for member in refused:
                self._queue.dismiss(member, str(error))
            generation.stop(0.0)
            return self._go_on(generation, self._with_those_left(), ExitCode.FAILED)
        self._on_started()
        self._began_seconds = time.monotonic()
        end = self._watch(generation)
        if end == ExitCode.SAVED and generation.regroups and not self.cluster.ordered:
            generation.stop(self.plan.grace_seconds)  # all ranks have saved and ended, for others to come or some to go
            return self._go_on(generation, self._with_those_left(), ExitCode.SAVED)
        return end if isinstance(end, int) else self._again(generation, self._end(generation, end))

    def _watch(self, generation: Generation) -> int | Diagnosis:
        """Wait for the generation's end; the exit code, or the diagnosis of its failure."""
        monitor, status = Monitor(generation), LiveStatus(generation)
        while True:
            ranks = generation.samples()
            status.look(ranks)
            generation.write_clocks()
            if all(one.code in GOOD_ENDS for one in ranks):
                return monitor.look_last() or good_code(ranks)
            due = due_seconds(ranks)
            if due is not None and time.monotonic() >= due:
                return monitor.judge_failure(ranks)
            saved = [one.ended_seconds for one in ranks if one.code == ExitCode.SAVED]
            if saved and due is None and time.monotonic() >= min(saved) + self.plan.stop_grace_seconds:
                return self._end_late(generation, ranks)
            if due is None and not saved and (stalled := monitor.look()) is not None:
                return stalled
            if due is None:
                self._queue.look(self.plan.attempt_dir, generation.proof)
                if self._queue.wanted:
                    generation.regroup()
            self.cluster.wait(monitor.look_seconds if due is None else POLL_FAILING_SECONDS)
            if self.cluster.ordered:
                return self._obey(generation)

    def _obey(self, generation: Generation) -> int:
        """End everything, as ordered; the exit code."""
        if self.cluster.launcher_gone:
            generation.stop(REMOTE_GRACE_SECONDS if self.plan.silence_seconds else LIFELINE_GRACE_SECONDS)
            return _launcher_gone()
        number = self.cluster.signals[0] if self.plan.plain_store else signal.SIGTERM
        generation.stop(self.plan.stop_grace_seconds, number, signals_heard=1)
        return self._stopped_by_signal(generation.samples())

    def _stopped_by_signal(self, ranks: Sequence[Sample]) -> int:
        if ranks and all(one.code in GOOD_ENDS for one in ranks):
            return good_code(ranks)
        if lost := [member for member in self.cluster.members.values() if member.lost]:
            # a scheduler ends all tasks of a step when one of them is gone: its order only follows from the loss
            for member in lost:
                say(f"{member.name} is lost: {member.lost}")
            return ExitCode.FAILED
        number = signal.Signals(self.cluster.signals[0])
        first = first_to_fail(ranks)
        if first is not None and rank_end(first) is RankEnd.EXCEPTION:  # it could not save, for example
            evidence = [Evidence.of(one) for one in ranks]
            say(format_failure(judge_samples(ranks), evidence, oom_kills=0, attempt_dir=self.plan.attempt_dir))
        say(f"stopped by {number.name}")
        return 128 + number

    def _end_late(self, generation: Generation, ranks: Sequence[Sample]) -> int:
        """End ranks that still run long after another has saved and stopped; rank 0 decides, for it saves for all."""
        late = ", ".join(str(one.rank) for one in ranks if one.code is None)
        generation.stop(self.plan.grace_seconds)
        if generation.own.samples()[0].code == ExitCode.SAVED:
            return ExitCode.SAVED
        say(
            f"rank {late} still ran {self.plan.stop_grace_seconds:g} s after another rank had saved its state and "
            f"stopped (exit code {int(ExitCode.SAVED)}), and rank 0 has not saved: all are stopped"
        )
        return ExitCode.FAILED

    def _end(self, generation: Generation, diagnosis: Diagnosis) -> FailedGeneration:
        """End the generation and report the verdict. Ranks that only wait are unblocked with it first."""
        stalled, self._words = diagnosis.waited_seconds > 0, diagnosis.line
        if stalled:
            say(diagnosis.page())
            generation.unblock(diagnosis.unblocked, diagnosis.word)
        generation.stop(self.plan.grace_seconds)
        if not stalled:  # after the ranks' own last words: the verdict shall be the last thing on the screen
            say(diagnosis.page(generation.oom_kills()))
        return FailedGeneration.of(
            diagnosis.verdict,
            diagnosis.evidence,
            diagnosis.exit_code,
            step=max(one.step for one in generation.samples()),  # of the dead, too
            nproc=generation.plan.nproc,
        )

    def _again(self, generation: Generation, failed: FailedGeneration) -> Restart | int:
        """Decide on a restart after a failure, and report the decision: the restart, or the exit code."""
        plan = self.plan
        # also lost while the others were being stopped, say
        lost = failed.end is RankEnd.LOST or len(self.cluster.here) < len(generation.members)
        first = failed.step == 0 and time.monotonic() < self._began_seconds + TRIAL_SECONDS
        new = [one for one in self._entered if first and not lost]
        for member in new:  # no step was taken with them; without them all went well
            self._queue.dismiss(member, self._words)
        if lost or new:
            decision = self._with_those_left()
        else:
            self._failures.append(failed)
            decision = decide(
                self._failures, nproc=plan.nproc, min_nproc=plan.min_nproc, max_restarts=plan.max_restarts
            )
        return self._go_on(generation, decision, failed.exit_code)

    def _with_those_left(self) -> Restart | str:
        """Decide on a start with the nodes that are here. It does not count as a restart after a failure."""
        plan, here = self.plan, 1 + sum(not member.leaves for member in self.cluster.here) + self._queue.count
        if plan.elastic and here >= plan.min_nodes:
            return Restart(plan.nproc)
        asked = f"--nodes {plan.min_nodes}:{plan.nodes}" if plan.elastic else f"--nodes {plan.nodes}"
        advice = "" if plan.elastic else " (over ssh, --nodes MIN:MAX goes on with fewer)"
        are = "is" if here == 1 else "are"
        return f"not restarted: {here} of {plan.nodes} nodes {are} left, {asked} asks for more{advice}"

    def _go_on(self, generation: Generation, decision: Restart | str, code: int) -> Restart | int:
        """Report the decision; the restart, or the exit code: `code` if no restart is possible."""
        if isinstance(decision, str):
            if decision:
                say(decision)
            return code
        self.cluster.wait(0.0)
        if self.cluster.ordered:
            return self._obey(generation)
        if left := generation.left():
            # it may still write to what the next generation reads
            pids = ", ".join(f"pid {pid}" for pid in left)
            say(f"Not restarting: {pids} did not exit after SIGKILL (stuck in the kernel?)")
            return code
        self._entered = self._queue.admit()
        members, came = self.cluster.here, len(self._entered)
        words = _restart_words(
            decision.nproc + sum(member.hello.nproc for member in members),
            1 + len(members),
            f"{len(self._failures)} of {self.plan.max_restarts}" if code != ExitCode.SAVED else "",
            came=came,
            gone=len(generation.members) + came - len(members),
            fewer=generation.plan.nproc > decision.nproc,
        )
        origin = "" if self.plan.plain_store else ", from the newest snapshot or checkpoint"
        say(f"{words} as generation {self._number + 1}{origin}")
        return decision


def _launcher_gone() -> ExitCode:
    say("the launcher is gone: its workers are stopped")
    return ExitCode.FAILED


def good_code(ranks: Sequence[Sample]) -> ExitCode:
    """The exit code if all workers ended in good order: saved (resumable), or done."""
    return ExitCode.SAVED if any(one.code == ExitCode.SAVED for one in ranks) else ExitCode.DONE
