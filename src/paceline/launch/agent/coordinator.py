"""The agent of node 0: it starts each generation, reports the first failure, decides on restarts, and ends the run.

A restart may help after an external cause, such as a killed process, a lack of memory or a broken network. After an
error of the program the run ends, since the error would happen again.
"""

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from msgspec.structs import replace

from paceline.errors import ExitCode, FaultyRankError, UsageError, first_few, plural
from paceline.guard.deaths import RankEndKind, classify_rank_end, diagnosis_due_at_seconds, first_to_fail
from paceline.guard.judge import diagnose_first_failure
from paceline.guard.report import RunEvent, same_diagnosis
from paceline.host.cleanup import agent_mark
from paceline.launch.agent.cluster import Generation, RemoteNode, RemoteNodes
from paceline.launch.agent.joining import JoinQueue, wait_for_nodes, with_reachable_master_addr
from paceline.launch.agent.monitor import LiveStatusWriter, Monitor, StopReport
from paceline.launch.agent.workers import InheritedResources
from paceline.protocol.balance import AUTO, SAMPLE_SECONDS, AutoBalancer, parse_balance
from paceline.protocol.control import AGENT_MARK, LIFELINE_GRACE_SECONDS, REMOTE_GRACE_SECONDS, StopSignals
from paceline.protocol.evidence import (
    LOADER_KILLED,
    SUCCESS_EXIT_CODES,
    Diagnosis,
    DiagnosisKind,
    Evidence,
    RankSample,
)
from paceline.protocol.job import EVENT_SECONDS, NodePlan
from paceline.runs import writing
from paceline.runs.attempt import AttemptEnd, write_attempt_end
from paceline.runs.console import MAX_NAMES, print_to_stderr

JOIN_TRIAL_SECONDS = 600.0  # a generation that fails in this time without a step fails because of the nodes that joined
EVENT_LOG, SCONTROL_SECONDS = "on-event.log", 3.0
POLL_FAILING_SECONDS = 0.05  # between checks for failure records after a failure; otherwise the guard sets the interval


# ---- whether another start may help ----


@dataclass(frozen=True)
class FailedGeneration:
    rank_end: RankEndKind | None  # of the rank that failed first; None: ranks made no progress or disagreed
    rank: int
    exit_code: int
    exception: str  # name of the exception's type; empty without a failure record
    step: int  # steps of the rank with the most steps
    nproc: int
    loader_killed: bool = False  # a DataLoader worker was killed, for example because memory ran out
    diagnosis: Diagnosis | None = None  # of the hang guard, if it has ended the generation
    good_exit_codes: frozenset[int] = frozenset()  # exit codes of ranks that had ended without a failure before

    @classmethod
    def from_diagnosis(
        cls, diagnosis: Diagnosis, ranks: Sequence[RankSample], exit_code: int, *, step: int, nproc: int,
        regroups: bool = False,
    ) -> Self:  # fmt: skip
        """With `regroups`, ranks end for the next generation: one that has saved does not mean a requested stop."""
        first = next((sample for sample in ranks if sample.rank == diagnosis.failed), None)
        if first is None:
            rank = diagnosis.causes[0] if diagnosis.causes else -1
            return cls(None, rank, exit_code, "", step, nproc, diagnosis=diagnosis)
        failure = first.failure
        return cls(
            rank_end=classify_rank_end(first), rank=first.rank, exit_code=exit_code,
            exception=failure.type if failure else "", step=step, nproc=nproc,
            loader_killed=bool(failure and LOADER_KILLED.search(failure.message)),
            good_exit_codes=frozenset(r.code for r in ranks if r.code is not None and not (r.ended_badly or regroups)),
        )  # fmt: skip

    @property
    def progress(self) -> tuple[int, int]:
        """The progress of the run: its steps. A script without steps has the number of its collective."""
        op = None if self.diagnosis is None else self.diagnosis.op
        return self.step, 0 if self.step or op is None else op.seq

    def is_like(self, other: Self) -> bool:
        if self.diagnosis is not None and other.diagnosis is not None:
            return same_diagnosis(self.diagnosis, other.diagnosis)
        return (self.rank_end, self.rank, self.exit_code) == (other.rank_end, other.rank, other.exit_code)


def _restart_message(ranks: int, nodes: int, number: str, *, joined: int, lost: int, fewer: bool) -> str:
    """The message for a restart. `joined` and `lost` are numbers of nodes; `number` is empty without a failure."""
    rank_count = plural(ranks, "rank")
    if not joined and not lost:
        explanation = " (one fewer, because the same failure occurred twice at the same step)" if fewer else ""
        return f"restart {number}: {rank_count}{explanation}" if number else f"continuing: {rank_count}"
    changes = [f"with {joined} more"] if joined else []
    changes += ["without it" if lost == 1 else f"without {lost} of them"] if lost else []
    return f"continuing {' and '.join(changes)}: {rank_count} on {plural(nodes, 'node')}"


def decide_restart(history: Sequence[FailedGeneration], *, nproc: int, min_nproc: int, max_restarts: int) -> int | str:
    """The number of ranks of a restart after the last failure, or why there is none; empty if `max_restarts` is 0.

    `history` has one failure per generation, the oldest first. `nproc` is the number of ranks of the first generation.
    At least `min_nproc` ranks must remain; 0: all.

    Example: 4 ranks, min_nproc 3. Rank 1 is killed at step 40: restart. It is killed again at step 40: restart with 3
    ranks, and the count starts again. Rank 1 of them is killed at step 40: restart. Again at step 40: the end.
    """
    last = history[-1]
    if max_restarts == 0:
        return ""
    if reason := _not_worth_it(last):
        return f"not restarted: {reason}"
    is_repeated = _is_repeated(history)
    if is_repeated and last.nproc - 1 < max(1, min_nproc or nproc):
        culprit = f"rank {last.rank}, " if last.rank >= 0 else ""
        step_text = f", after step {last.step}" if last.step else ""
        return f"not restarted: the same failure at the same step twice: {culprit}exit code {last.exit_code}{step_text}"
    if len(history) > max_restarts:
        return f"not restarted: {max_restarts} of {max_restarts} restarts are used up"
    return last.nproc - 1 if is_repeated else last.nproc


def _is_repeated(history: Sequence[FailedGeneration]) -> bool:
    if len(history) < 2:
        return False
    previous, last = history[-2:]
    # A restart resumes from a checkpoint: a failure before the earlier step is not progress
    return previous.nproc == last.nproc and last.is_like(previous) and last.progress <= previous.progress


def _not_worth_it(last: FailedGeneration) -> str:
    """Why a restart would fail again; empty if it may help."""
    if ExitCode.SAVED in last.good_exit_codes:
        return "a rank had saved its state and stopped, so a stop was requested"
    if last.exit_code == ExitCode.USAGE:
        return "a restart cannot fix wrong use"
    if last.diagnosis is not None and last.diagnosis.kind in (DiagnosisKind.MISMATCH, DiagnosisKind.DEADLOCK):
        return "the ranks call different collectives, an error of the program that a restart would repeat"
    if last.exit_code in (ExitCode.NOT_FINITE, ExitCode.DIVERGED):
        return "wrong results are an error of the program or of a node, and a restart would repeat it"
    has_left = last.diagnosis is not None and last.diagnosis.kind is DiagnosisKind.LEFT
    if has_left or (last.rank_end is RankEndKind.VICTIM and last.good_exit_codes):
        return "a rank ended while others ran, which is an error of the program"
    if last.rank_end is RankEndKind.EXCEPTION and not last.loader_killed:
        return f"{last.exception} is an error of the program, and a restart would repeat it"
    if last.rank_end is RankEndKind.EXIT:
        return f"the program ended with exit code {last.exit_code}, and a restart would repeat it"
    return ""


# ---- the command of --on-event ----


class EventCommand:
    """Runs the command of --on-event for each event of an attempt, with the event as JSON on its standard input.

    A command neither delays nor fails the run. It runs in a thread and a new process group, after the commands of
    earlier events, and is killed after EVENT_SECONDS. The first failure is reported.
    """

    def __init__(self, plan: NodePlan) -> None:
        self._plan, self._log = plan, Path(plan.attempt_dir) / EVENT_LOG
        self._last: threading.Thread | None = None
        self._reported = False

    @property
    def is_running(self) -> bool:
        return self._last is not None and self._last.is_alive()

    def send(self, kind: Literal["diagnosis", "restart", "requeue", "end"], generation: int, **fields: Any) -> None:
        """Start the command for an event, and return without waiting. `fields` are those of RunEvent."""
        if not self._plan.on_event:
            return
        event = RunEvent(
            kind, round(time.time(), 3), self._plan.name, self._plan.run_dir, self._plan.attempt_dir,
            os.uname().nodename, generation, **fields,
        )  # fmt: skip
        self._last = threading.Thread(target=self._run, args=(event, self._last), daemon=True)
        self._last.start()

    def _run(self, event: RunEvent, previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()
        try:
            reason = self._failure(msgspec.json.encode(event) + b"\n")
        except Exception as error:  # otherwise the thread would print a traceback
            reason = str(error)
        if reason and not self._reported:
            self._reported = True
            print_to_stderr(
                f"warning: the command of --on-event failed at the event {event.kind}: {reason}. Output: {self._log}"
            )

    def _failure(self, data: bytes) -> str:
        """Run the command. Returns why it failed; empty if it did not."""
        # with the mark, the cleanup process ends the command if this agent is killed. The end of a generation spares it
        env = os.environ | {AGENT_MARK: agent_mark("event")}
        shell, pipe = ("/bin/sh", "-c", self._plan.on_event), subprocess.PIPE
        with os.fdopen(writing.open_or_create(self._log, append=True), "ab", 0) as log:
            process = subprocess.Popen(shell, env=env, stdin=pipe, stdout=log, stderr=log, start_new_session=True)
            try:
                process.communicate(data, timeout=EVENT_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"it was killed after {EVENT_SECONDS:g} s"
        return f"exit code {process.returncode}" if process.returncode else ""


def will_requeue(plan: NodePlan, signals: Sequence[int]) -> bool:
    """Whether the batch script queues a saved job again. It follows `_REQUEUE` in launch/slurm/plan.py."""
    last = signals[-1] if signals and plan.queues_again else 0
    if last != signal.SIGTERM:
        return last == signal.SIGUSR1  # the time limit
    command = ("scontrol", "--oneliner", "show", "job", os.environ.get("SLURM_JOB_ID", ""))
    with suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=SCONTROL_SECONDS)
        return b" PreemptTime=2" in shown  # a date; None without a preemption
    return False


# ---- the run ----


class Coordinator:
    def __init__(
        self, plan: NodePlan, orders: StopSignals, inherited: InheritedResources, on_started: Callable[[], None]
    ) -> None:
        self.plan, self.cluster = plan, RemoteNodes(plan, orders)
        self._inherited = inherited
        self._on_started = on_started  # called when all nodes have started their workers
        self._number, self._nproc = 0, plan.nproc  # of the generation; its ranks on node 0
        self._cause = ""  # cause of the last failure, in one line
        self._failures: list[FailedGeneration] = []
        self._events = EventCommand(plan)
        self._queue, self._began_seconds = JoinQueue(plan, self.cluster), 0.0
        self._meter = AutoBalancer()  # for --balance auto
        self._max_look_seconds = SAMPLE_SECONDS if plan.balance == AUTO else math.inf
        self._is_balance_checked, self._is_limit_printed = not plan.balance, False
        self._regrouped = False  # whether the last generation saved its state and ended for the present one
        self._entered: Sequence[RemoteNode] = ()  # nodes that joined with the present generation
        self._separate: Sequence[RemoteNode] = ()  # nodes that do not see the run folder of node 0

    def run(self) -> int:
        """Run the workers to their end, with restarts after failures if that may help; return the exit code."""
        code = int(ExitCode.FAILED)
        try:
            code = self._run()
        except (UsageError, OSError) as error:
            if self._number == 0:  # no worker has run: it is wrong use
                code = ExitCode.USAGE
                raise
            reason = error.message_with_code if isinstance(error, UsageError) else error
            print_to_stderr(f"cannot restart the workers: {reason}")
        finally:  # also after a bug in paceline
            with suppress(Exception):  # an event never changes the end of the run
                self._send_end(code)
            self.cluster.end(code)
            self._queue.withdraw_invitation()
            if self.plan.attempt_dir:
                write_attempt_end(Path(self.plan.attempt_dir), AttemptEnd(int(code), self._cause_of(code)))
        return code

    def _cause_of(self, code: int) -> str:
        return "" if code in SUCCESS_EXIT_CODES else self._cause

    def _send_end(self, code: int) -> None:
        """Send the last event, and wait for its command. Other nodes end after it, so that an ssh launcher waits."""
        kind = "requeue" if code == ExitCode.SAVED and will_requeue(self.plan, self.cluster.signals) else "end"
        self._events.send(kind, self._number, exit=int(code), words=self._cause_of(code))
        deadline = time.monotonic() + self.plan.event_wait_seconds
        while self._events.is_running and time.monotonic() < deadline:
            self.cluster.wait_for_events(POLL_FAILING_SECONDS)

    def _run(self) -> int:
        self.plan = with_reachable_master_addr(wait_for_nodes(self.plan, self.cluster), self.cluster)
        self._queue.publish_invitation(self.plan)
        while not self.cluster.is_stop_ordered:
            self.plan = with_reachable_master_addr(self.plan, self.cluster)
            ranks = replace(self.plan.ranks, restarts=len(self._failures), speeds=self._speeds(self._nproc))
            plan = replace(self.plan, nproc=self._nproc, ranks=ranks)
            with Generation.start(plan, self._number, self.cluster, self._inherited) as generation:
                code = self._run_generation(generation)
            if code is not None:
                return code
            self._number += 1
        return _launcher_gone() if self.cluster.launcher_gone else self._stopped_by_signal([])

    def _speeds(self, nproc: int) -> tuple[float, ...]:
        """The speeds for the next generation, of each rank or node. Empty: equal."""
        if self.plan.balance != AUTO:
            return parse_balance(self.plan.balance or None)
        members = self.cluster.present_nodes
        self._meter.start([*[self] * nproc, *(member for member in members for _ in range(member.hello.nproc))])
        return self._meter.speeds

    def _balance(self, generation: Generation, ranks: Sequence[RankSample]) -> None:
        if not self._is_balance_checked and any(sample.script and sample.step for sample in ranks):
            self._is_balance_checked = True
            print_to_stderr(f"warning: --balance {self.plan.balance} has no effect: the script has no paceline session")
        running = all(sample.is_running for sample in ranks)
        if self.plan.balance == AUTO and running and not generation.regroups and self._meter.update(ranks):
            counts = ", ".join(f"{count:g}" for count in self._meter.speeds)
            print_to_stderr(f"--balance auto: the ranks save and restart. They then compute {counts} virtual ranks")
            generation.regroup()
        if (limited := self._meter.limited) and not self._is_limit_printed:
            self._is_limit_printed = True
            numbers = [f"rank {rank}: {fast} by speed, {most} by memory" for rank, (fast, most) in limited.items()]
            names = first_few(numbers, MAX_NAMES, "; ")
            print_to_stderr(f"--balance auto: memory prevents a faster assignment of virtual ranks: {names}")

    def _run_generation(self, generation: Generation) -> int | None:
        """The exit code of the run; None if another generation follows, with `self._nproc` ranks on node 0."""
        try:
            if not generation.wait_started():
                return self._obey(generation)
        except UsageError as error:
            refused = [node for node in self._entered if node.started is not None and node.started.refusal]
            if not refused:
                raise
            for member in refused:
                self._queue.dismiss(member, str(error))
            generation.stop(0.0)
            return self._continue(generation, self._with_remaining_nodes(), ExitCode.FAILED)
        self._on_started()
        self._print_separate_folders(generation)
        self._began_seconds = time.monotonic()
        outcome = self._watch(generation)
        self._regrouped = False
        if outcome == ExitCode.SAVED and generation.regroups and not self.cluster.is_stop_ordered:
            generation.stop(self.plan.grace_seconds)  # all ranks have saved and ended
            self._regrouped = True
            is_fixed = not self.plan.elastic and len(self.cluster.present_nodes) == len(generation.members)
            decision = generation.plan.nproc if is_fixed else self._with_remaining_nodes()
            return self._continue(generation, decision, ExitCode.SAVED)
        return outcome if isinstance(outcome, int) else self._decide_restart(generation, self._end(generation, outcome))

    def _print_separate_folders(self, generation: Generation) -> None:
        separate = [m for m in generation.members if m.started is not None and m.started.copies_files]
        if names := [member.name for member in separate if member not in self._separate]:
            copy = "; node 1 keeps a copy" if generation.members[0] in separate else ""
            print_to_stderr(
                f"{first_few(names, MAX_NAMES)} {'has' if len(names) == 1 else 'have'} no shared file system: paceline "
                f"copies checkpoints, events and logs to node 0{copy}"
            )
        self._separate = separate

    def _watch(self, generation: Generation) -> int | StopReport:
        monitor, status = Monitor(generation), LiveStatusWriter(generation)
        while True:
            ranks = generation.worker_samples()
            status.update(ranks)
            generation.write_clocks()
            if all(sample.code in SUCCESS_EXIT_CODES for sample in ranks):
                return monitor.check_at_end() or success_exit_code(ranks)
            due = diagnosis_due_at_seconds(ranks)
            if due is not None and time.monotonic() >= due:
                return monitor.judge_failure(ranks)
            save_times = [sample.ended_seconds for sample in ranks if sample.code == ExitCode.SAVED]
            if save_times and due is None and time.monotonic() >= min(save_times) + self.plan.grace_period_seconds:
                return self._end_late(generation, ranks)
            if due is None and not save_times and (stall := monitor.check()) is not None:
                return stall
            if due is None:
                self._queue.check_waiting_nodes()
                if self._queue.is_regroup_wanted:
                    generation.regroup()
                self._balance(generation, ranks)
            look_seconds = min(monitor.look_seconds, self._max_look_seconds)
            self.cluster.wait_for_events(look_seconds if due is None else POLL_FAILING_SECONDS)
            self.cluster.adopt_stop_signal(ranks)
            if self.cluster.is_stop_ordered:
                return self._obey(generation)

    def _obey(self, generation: Generation) -> int:
        if self.cluster.launcher_gone:
            generation.stop(REMOTE_GRACE_SECONDS if self.plan.silence_seconds else LIFELINE_GRACE_SECONDS)
            return _launcher_gone()
        number = self.cluster.signals[0] if self.plan.plain_store else signal.SIGTERM
        generation.save_and_stop(number)
        return self._stopped_by_signal(generation.worker_samples())

    def _stopped_by_signal(self, ranks: Sequence[RankSample]) -> int:
        if ranks and all(sample.code in SUCCESS_EXIT_CODES for sample in ranks):
            return success_exit_code(ranks)
        # only rank 0 of this script reports steps after which it can stop; its end ends the other ranks
        if [sample.rank for sample in ranks if sample.steps_ended] == [0] and ranks[0].code == ExitCode.SAVED:
            return ExitCode.SAVED
        if lost_members := [member for member in self.cluster.members.values() if member.lost]:
            # the loss is the cause: a scheduler signals all tasks of a step when one of them is lost
            for member in lost_members:
                print_to_stderr(f"{member.name} is lost: {member.lost}")
            return ExitCode.FAILED
        number = signal.Signals(self.cluster.signals[0])
        first = first_to_fail(ranks)
        if first is not None and classify_rank_end(first) is RankEndKind.EXCEPTION:  # it could not save, for example
            evidence = [Evidence.from_sample(sample) for sample in ranks]
            self._report(StopReport(diagnose_first_failure(ranks), evidence, self.plan.attempt_dir))
        if self._regrouped and not any(sample.step for sample in ranks):
            print_to_stderr(f"stopped by {number.name} while the ranks started again: their state is saved")
            return ExitCode.SAVED
        print_to_stderr(f"stopped by {number.name}")
        return 128 + number

    def _end_late(self, generation: Generation, ranks: Sequence[RankSample]) -> int:
        """Stop ranks that still run long after another rank has saved. The run is saved if rank 0 has saved it."""
        late = ", ".join(str(sample.rank) for sample in ranks if sample.code is None)
        generation.stop(self.plan.grace_seconds)
        if generation.own.worker_samples()[0].code == ExitCode.SAVED:
            return ExitCode.SAVED
        print_to_stderr(
            f"rank {late} still ran {self.plan.grace_period_seconds:g} s after another rank had saved its state and "
            f"stopped (exit code {int(ExitCode.SAVED)}), and rank 0 has not saved: stopping all ranks"
        )
        return ExitCode.FAILED

    def _end(self, generation: Generation, stop: StopReport) -> FailedGeneration:
        """End the generation and print the diagnosis. Ranks that only wait are unblocked first, so that they save."""
        is_stall, self._cause = stop.waited_seconds > 0, stop.line
        if is_stall:
            self._report(stop)
            generation.unblock(stop.ranks_to_unblock, stop.unblock_message)
        generation.stop(self.plan.grace_seconds)
        if not is_stall:  # after the last output of the ranks, so that the diagnosis is at the end of the screen
            self._report(stop, generation.oom_kills())
        return FailedGeneration.from_diagnosis(
            stop.diagnosis,
            stop.evidence,
            stop.exit_code,
            step=max(sample.step for sample in generation.worker_samples()),  # includes ranks that have ended
            nproc=generation.plan.nproc,
            regroups=generation.regroups,
        )

    def _report(self, stop: StopReport, oom_kills: int = 0) -> None:
        text = stop.screen_text(oom_kills)
        print_to_stderr(text)
        self._events.send("diagnosis", self._number, words=stop.line, report=text, diagnosis=stop.diagnosis)

    def _decide_restart(self, generation: Generation, failed: FailedGeneration) -> int | None:
        plan = self.plan
        if failed.exception == FaultyRankError.__name__:
            decision = self._without_rank(generation, failed.rank)
            return self._continue(generation, decision, failed.exit_code, counts=False)
        # a node may also be lost while the others are being stopped
        is_lost = failed.rank_end is RankEndKind.LOST or len(self.cluster.present_nodes) < len(generation.members)
        is_trial = failed.step == 0 and time.monotonic() < self._began_seconds + JOIN_TRIAL_SECONDS
        new_nodes = [node for node in self._entered if is_trial and not is_lost]
        for member in new_nodes:  # the run made progress without them, and no step with them
            self._queue.dismiss(member, self._cause)
        if is_lost or new_nodes:
            decision = self._with_remaining_nodes()
        else:
            self._failures.append(failed)
            decision = decide_restart(
                self._failures, nproc=plan.nproc, min_nproc=plan.min_nproc, max_restarts=plan.max_restarts
            )
        return self._continue(generation, decision, failed.exit_code)

    def _with_remaining_nodes(self) -> int | str:
        plan, staying = self.plan, [member for member in self.cluster.present_nodes if not member.leaves]
        count = 1 + len(staying) + len(self._queue.ready)
        if plan.elastic and count >= plan.min_nodes:
            return plan.nproc
        option = f"--nodes {plan.min_nodes}:{plan.nodes}" if plan.elastic else f"--nodes {plan.nodes}"
        advice = "" if plan.elastic else " (over ssh, --nodes MIN:MAX continues with fewer)"
        verb = "remains" if count == 1 else "remain"
        return f"not restarted: {count} of {plan.nodes} nodes {verb}, but {option} requires more{advice}"

    def _without_rank(self, generation: Generation, rank: int) -> int | str:
        """Decide on a start without a rank that an audit has named. On another node, all ranks of it are left out."""
        first, plan = generation.plan.nproc, self.plan
        if rank < first:
            if first == 1:
                return f"not restarted: rank {rank} is the only one of node 0, with which the run ends"
            if first - 1 < plan.min_nproc:
                return f"not restarted: {first - 1} ranks remain, but --min-nproc {plan.min_nproc} requires more"
            devices = [device for local, device in enumerate(plan.devices or range(first)) if local != rank]
            self.plan = replace(plan, nproc=first - 1, devices=tuple(devices))
            return first - 1
        for member in generation.members:
            first += member.hello.nproc
            if rank < first:
                member.leaves = "an audit has found wrong numbers"
                break
        return self._with_remaining_nodes()

    def _continue(self, generation: Generation, decision: int | str, code: int, *, counts: bool = True) -> int | None:
        """Prepare the next generation, with the decided number of ranks on node 0; or end the run with `code`."""
        if isinstance(decision, str):
            if decision:
                print_to_stderr(decision)
            return code
        self.cluster.wait_for_events(0.0)
        if self.cluster.is_stop_ordered:
            return self._obey(generation)
        if left_pids := [*generation.own.left, *(n for node in self.cluster.present_nodes for n in node.beat.left)]:
            # such a process may still write to files that the next generation reads
            pids = ", ".join(f"pid {pid}" for pid in left_pids)
            print_to_stderr(f"Not restarting: {pids} did not exit after SIGKILL (stuck in the kernel?)")
            return code
        self._nproc, self._entered = decision, self._queue.admit()
        members, joined = self.cluster.present_nodes, len(self._entered)
        message = _restart_message(
            decision + sum(member.hello.nproc for member in members),
            1 + len(members),
            f"{len(self._failures)} of {self.plan.max_restarts}" if counts and code != ExitCode.SAVED else "",
            joined=joined,
            lost=len(generation.members) + joined - len(members),
            fewer=generation.plan.nproc > decision,
        )
        origin = "" if self.plan.plain_store else ", from the newest snapshot or checkpoint"
        message += f" as generation {self._number + 1}{origin}"
        print_to_stderr(message)
        self._events.send("restart", self._number + 1, words=message)
        return None


def _launcher_gone() -> ExitCode:
    print_to_stderr("the launcher has ended: stopping its workers")
    return ExitCode.FAILED


def success_exit_code(ranks: Sequence[RankSample]) -> ExitCode:
    """The exit code if no worker has failed: SAVED if one has saved (resumable), otherwise DONE."""
    return ExitCode.SAVED if any(sample.code == ExitCode.SAVED for sample in ranks) else ExitCode.DONE
