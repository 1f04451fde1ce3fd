"""The monitor of a generation, on node 0: it diagnoses stalls, failures and silent faults, and serves `paceline watch`.

The coordinator decides about the run. After an error of the monitor, paceline warns once, and the run continues
without the monitor. Failures are then diagnosed from samples alone.
"""

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from paceline.errors import ExitCode
from paceline.guard import detectors
from paceline.guard.collect import ANSWER_SECONDS
from paceline.guard.judge import diagnose, diagnose_first_failure, is_deadlocked
from paceline.guard.report import (
    EXIT_CODES,
    format_failure,
    format_report,
    format_warning,
    summarize_diagnosis,
    write_diagnosis,
)
from paceline.guard.sentences import format_subject_verb
from paceline.guard.silent import SilentFaultDetector, calls_by_rank
from paceline.launch.agent.cluster import Generation
from paceline.launch.agent.joining import why_nodes_unreachable
from paceline.protocol.evidence import (
    CHECKPOINT_ASK,
    LIVE,
    WATCHED_FILE,
    Diagnosis,
    DiagnosisKind,
    Evidence,
    LiveSamples,
    RankSample,
)
from paceline.runs import writing
from paceline.runs.attempt import ScriptNotice, append_script_notice
from paceline.runs.console import print_to_stderr

FAILURE_ANSWER_SECONDS = 0.3  # for answers after a failure
WARNING_ANSWER_SECONDS = 0.5  # for answers that only decide on a warning
LEFT_RANK_SECONDS = 5.0  # after this time, the diagnosis is certain if a rank has ended and all others wait
REACHABILITY_TEST_SECONDS = 6.0
WAITING_CALLS_TIMEOUT_SECONDS = 0.5  # for the calls behind a silent fault
REQUEST_POLL_SECONDS = 1.0
MAX_HANG_REQUESTS = 8  # requests of `paceline hang` that are answered at a time
HANG_REQUEST_PATTERN = re.compile(r"ask-[0-9]{1,10}-([0-9A-Za-z_-]{1,64})")
# diagnoses that are possible before the timeout
EARLY_DIAGNOSIS_KINDS = (DiagnosisKind.LEFT, DiagnosisKind.NOT_MET, DiagnosisKind.STOPPED)


@dataclass(frozen=True)
class StopReport:
    diagnosis: Diagnosis
    evidence: Sequence[Evidence]
    attempt_dir: str
    waited_seconds: float = 0.0  # time without progress; 0: a rank has failed
    report: str = ""  # the text for the screen, unless the failure of a rank is the whole diagnosis

    @property
    def ranks_to_unblock(self) -> tuple[int, ...]:
        return detectors.ranks_to_interrupt(self.diagnosis, self.evidence)

    @property
    def exit_code(self) -> int:
        """The exit code of the run: that of the failed rank, if its failure is the whole diagnosis."""
        failed = next((evidence for evidence in self.evidence if evidence.rank == self.diagnosis.failed), None)
        return EXIT_CODES.get(self.diagnosis.kind, ExitCode.STALLED) if failed is None else failed.shell_exit_code

    @property
    def unblock_message(self) -> str:
        message = {"kind": self.diagnosis.kind.name, "page": self.screen_text(), "exit_code": int(self.exit_code)}
        return msgspec.json.encode(message | {"causes": self.diagnosis.causes}).decode()

    @property
    def line(self) -> str:
        return self.report.partition("\n")[0] or summarize_diagnosis(self.diagnosis, self.evidence, self.waited_seconds)

    def screen_text(self, oom_kills: int = 0) -> str:
        """The report for the screen. `oom_kills` is the number of processes that the kernel killed for memory."""
        if self.report:
            return self.report
        return format_failure(self.diagnosis, self.evidence, oom_kills=oom_kills, attempt_dir=self.attempt_dir)


class Monitor:
    def __init__(self, generation: Generation) -> None:
        self._generation, self._plan = generation, generation.plan
        self._windows = self._plan.hang_timeout
        self._stalls = detectors.StallDetector(self._windows)
        self._stragglers = detectors.StragglerDetector(
            {sample.rank: sample.host for sample in generation.worker_samples()}
        )
        self.look_seconds = detectors.sample_interval_seconds(self._windows)  # interval between two samples
        self._looked_seconds = self._asked_seconds = self._early_seconds = 0.0
        self._silent = SilentFaultDetector(
            self._plan.ranks.world_size,
            generation.own.tensor_names,
            lambda: calls_by_rank(generation.collect_evidence(WAITING_CALLS_TIMEOUT_SECONDS)),
        )
        self._sleep = detectors.SleepingRankDetector(self._windows)
        self._unmet = detectors.DeadlockCheckSchedule(self._windows)
        self._off = self._windows.off

    def check(self) -> StopReport | None:
        """Run the detectors that are due; a diagnosis if the run is to be ended."""
        if self._off or time.monotonic() < self._looked_seconds + self.look_seconds / 2:
            return None
        try:
            self._looked_seconds = time.monotonic()
            return self._look()
        except Exception as error:
            return self._give_up(error)

    def check_at_end(self) -> StopReport | None:
        try:
            return None if self._off else self._look_for_silent_faults(last=True)
        except Exception as error:
            return self._give_up(error)

    def judge_failure(self, samples: Sequence[RankSample]) -> StopReport:
        if not self._off:
            try:
                evidence = self._generation.collect_evidence(FAILURE_ANSWER_SECONDS, to_its_end=True)
                return self._make_stop_report(diagnose(evidence), evidence, 0.0)
            except Exception as error:
                self._give_up(error)
        evidence = [*map(Evidence.from_sample, samples)]
        return StopReport(diagnose_first_failure(samples), evidence, self._plan.attempt_dir)

    def _give_up(self, error: Exception) -> None:
        self._off = True
        reason = f"{type(error).__name__}: {error}"
        print_to_stderr(
            f"warning: the hang guard crashed and is disabled; training continues without hang detection: {reason}"
        )

    def _look(self) -> StopReport | None:
        running = self._generation.running_workers()
        self.look_seconds = detectors.heartbeat_interval_seconds(self._windows, self._plan.nodes, running)
        states = detectors.mark_unknown_as_waiting(running, self._plan.ranks.world_size)
        alarm = self._stalls.update(time.monotonic(), states)
        for kind, notice in (("", self._stalls.notice), ("slow", self._straggler_warning(running))):
            if notice:
                self._notify(notice, kind=kind)
        self._stalls.notice = ""
        if stop := self._look_for_silent_faults():
            return stop
        self._answer_asks()
        if stop := self._diagnose_deadlock(running):
            return stop
        alarm = alarm or self._early_alarm(running)
        if alarm is None:
            return None
        is_warning = alarm.kind == "warn"
        evidence = self._generation.collect_evidence(WARNING_ANSWER_SECONDS if is_warning else ANSWER_SECONDS)
        if unwatched_ranks := [rank.rank for rank in evidence if not rank.watched]:
            self._off = True  # the guard cannot inspect the new program
            ranks = f"{format_subject_verb(unwatched_ranks, 'has', 'have')}"
            print_to_stderr(f"warning: the hang guard is off: {ranks} started a different program (exec)")
            return None
        if self._generation.interrupted or not detectors.is_run_stalled(evidence, alarm, self._windows):
            return None
        if not is_warning:
            return self._stall(evidence, alarm)
        ranks = [replace(rank, waiting=detectors.is_waiting(rank)) for rank in evidence if rank.is_running]
        print_to_stderr(format_warning(ranks, still_seconds=alarm.still_seconds, window_seconds=alarm.window_seconds))
        return None

    def _look_for_silent_faults(self, *, last: bool = False) -> StopReport | None:
        samples = self._generation.worker_samples()
        if not any(sample.script for sample in samples):
            return None
        faults = self._silent.update(samples, last=last)
        stops_run, step = self._plan.on_drift == "stop", max(sample.step for sample in samples)
        for notice in self._silent.notices:
            self._notify(notice.words, step, kind=notice.kind)
        self._silent.notices.clear()
        for fault in faults[:1] if stops_run else faults:
            name = fault.kind.name.replace("_", " ")
            message = f"{name}{f' at step {fault.step}' if fault.step else ''}: {'; '.join(fault.sentences)}"
            # if the fault ends the run, its report follows on the screen
            self._notify(message, fault.step or step, kind=name.lower(), on_screen=not stops_run)
        if not (stops_run and faults):
            return None
        return self._make_stop_report(faults[0], self._generation.collect_evidence(WAITING_CALLS_TIMEOUT_SECONDS), 0.0)

    def _notify(self, message: str, step: int = 0, *, kind: str = "", on_screen: bool = True) -> None:
        if on_screen:
            print_to_stderr(message)
        if self._plan.attempt_dir:
            append_script_notice(Path(self._plan.attempt_dir), ScriptNotice(round(time.time(), 3), message, step, kind))

    def _straggler_warning(self, running: Sequence[RankSample]) -> str:
        warning_text = self._stragglers.update(running)
        if warning_text and self._stragglers.rank is not None:
            evidence = self._generation.collect_evidence(WARNING_ANSWER_SECONDS)
            gpus = [rank.gpu for rank in evidence if rank.rank == self._stragglers.rank and rank.gpu]
            warning_text += "".join(f". {gpu}" for gpu in gpus)
        return warning_text

    def _diagnose_deadlock(self, running: Sequence[RankSample]) -> StopReport | None:
        """A diagnosis of ranks that wait in collectives which can never complete, before the timeout."""
        if not self._unmet.should_collect(time.monotonic(), running):
            return None
        evidence = self._generation.collect_evidence(WARNING_ANSWER_SECONDS)
        if self._generation.interrupted or not is_deadlocked(evidence):
            return None
        diagnosis = diagnose(evidence)
        if diagnosis.kind not in (DiagnosisKind.MISMATCH, DiagnosisKind.DEADLOCK):
            return None
        seconds = max(rank.still_seconds for rank in evidence if rank.is_running)
        return self._make_stop_report(diagnosis, evidence, seconds)

    def _early_alarm(self, running: Sequence[RankSample]) -> detectors.StallAlarm | None:
        """An alarm before the timeout, if waiting longer would give no further information.

        This is the case if a rank has ended with code 0 and all others wait; or if ranks have not completed the
        rendezvous within a timeout that the user has set.
        """
        now, still_seconds = time.monotonic(), min((sample.still_seconds for sample in running), default=0.0)
        if now < self._early_seconds:
            return None
        timeout_seconds, has_met = self._windows.seconds, any(sample.met for sample in running)
        several = self._plan.ranks.world_size > 1
        not_met = several and not has_met and timeout_seconds is not None and still_seconds >= timeout_seconds
        all_wait = still_seconds >= LEFT_RANK_SECONDS and all(sample.waiting for sample in running)
        if self._sleep.should_collect(running):
            return detectors.StallAlarm("stall", still_seconds, 0.0)
        has_left = any(sample.code == ExitCode.DONE for sample in self._generation.worker_samples())
        if not not_met and not (all_wait and has_left):
            return None
        self._early_seconds = now + still_seconds  # after a false alarm, check less often
        return detectors.StallAlarm("stall", still_seconds, 0.0)

    def _stall(self, evidence: Sequence[Evidence], alarm: detectors.StallAlarm) -> StopReport | None:
        diagnosis = diagnose(evidence)
        proof = self._sleep.proves_sleep(diagnosis, evidence)
        if not alarm.window_seconds and not (diagnosis.kind in EARLY_DIAGNOSIS_KINDS if proof is None else proof):
            return None
        if diagnosis.kind is DiagnosisKind.NETWORK:
            failures = why_nodes_unreachable(
                self._generation.cluster, REACHABILITY_TEST_SECONDS, lambda: self._generation.interrupted
            )
            diagnosis = replace(diagnosis, sentences=(*diagnosis.sentences, *failures[:8]))
            if self._generation.interrupted or time.monotonic() < self._generation.cluster.settled_seconds:
                return None  # after a network interruption, connections recover with a delay
        return self._make_stop_report(diagnosis, evidence, max(rank.still_seconds for rank in evidence))

    def _make_stop_report(
        self, diagnosis: Diagnosis, evidence: Sequence[Evidence], waited_seconds: float
    ) -> StopReport:
        """Create the report of the stop. Write the diagnosis into a folder, unless it is only a failure of a rank."""
        if diagnosis.failed is not None:
            return StopReport(diagnosis, evidence, self._plan.attempt_dir)
        short_folder = run = ""
        if self._plan.attempt_dir:  # without a folder, there is only the report on the screen
            folders = (Path(self._plan.attempt_dir) / f"diagnosis-{n}" for n in range(1, 1000))
            folder = next(folder for folder in folders if not folder.exists())
            try:
                write_diagnosis(folder, diagnosis, evidence, waited_seconds=waited_seconds)
                short_folder, run = _short(folder), _short(Path(self._plan.run_dir)) if self._plan.run_dir else ""
            except OSError:  # with a full disk, print the report anyway
                shutil.rmtree(folder, ignore_errors=True)
        report = format_report(diagnosis, evidence, waited_seconds=waited_seconds, folder=short_folder, run=run)
        return StopReport(diagnosis, evidence, self._plan.attempt_dir, waited_seconds, report)

    def _answer_asks(self) -> None:
        """Answer `paceline hang`, which creates a file in the attempt's folder and waits for a diagnosis."""
        if time.monotonic() < self._asked_seconds + REQUEST_POLL_SECONDS or not self._plan.attempt_dir:
            return
        self._asked_seconds = time.monotonic()
        folder = Path(self._plan.attempt_dir)
        nonces: list[str] = []
        with suppress(OSError):  # requests that were taken before the error get an answer
            nonces.extend(take_request_files(folder, HANG_REQUEST_PATTERN))
        for nonce in nonces[:MAX_HANG_REQUESTS]:
            evidence = self._generation.collect_evidence(ANSWER_SECONDS)
            waited_seconds = min((rank.still_seconds for rank in evidence if rank.code is None), default=0.0)
            with suppress(OSError):
                answer = folder / f"diagnosis-live-{nonce}"
                write_diagnosis(answer, diagnose(evidence), evidence, waited_seconds=waited_seconds)


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (OSError, ValueError):  # the working folder was deleted, or the path is outside
        return str(path)


# ---- `paceline watch` ----

STATUS_INTERVAL_SECONDS = 0.9  # the coordinator calls `LiveStatusWriter.update` about once a second
WATCH_TIMEOUT_SECONDS = 15.0  # since `paceline watch` last touched its file
CHECKPOINT_REQUEST_PATTERN = re.compile(f"{CHECKPOINT_ASK}(.*)", re.DOTALL)


class LiveStatusWriter:
    """Writes the state of a generation while `paceline watch` watches it."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._folder = Path(generation.plan.attempt_dir)
        self._looked_seconds = 0.0
        self._touched, self._touched_seconds = 0, float("-inf")  # time of the file, and time when it was read
        self._off = not generation.plan.attempt_dir

    def update(self, ranks: Sequence[RankSample]) -> None:
        now = time.monotonic()
        if self._off or now < self._looked_seconds + STATUS_INTERVAL_SECONDS:
            return
        self._looked_seconds = now
        try:
            if self._is_watched(now):
                live = LiveSamples(round(time.time(), 3), self._generation.own.number, tuple(map(_live_part, ranks)))
                writing.replace_file(self._folder / LIVE, msgspec.json.encode(live))
            if [*take_request_files(self._folder, CHECKPOINT_REQUEST_PATTERN)]:
                self._generation.own.ask_to_save()  # rank 0 runs on this node, and its vote counts for all ranks
        except Exception as error:
            self._off = True
            reason = f"{type(error).__name__}: {error}"
            print_to_stderr(f"warning: `paceline watch` gets no further updates of this run: {reason}")

    def _is_watched(self, now_seconds: float) -> bool:
        """Whether the time of the file has changed recently. This does not compare the clocks of two machines."""
        try:
            touched = (self._folder / WATCHED_FILE).lstat().st_mtime_ns
        except FileNotFoundError:
            return False
        if touched != self._touched:
            self._touched, self._touched_seconds = touched, now_seconds
        return now_seconds < self._touched_seconds + WATCH_TIMEOUT_SECONDS


def _live_part(sample: RankSample) -> RankSample:
    """A sample without the parts that `paceline watch` does not show: the file has thousands of ranks."""
    seconds = tuple(round(seconds, 6) for seconds in sample.phase_seconds)
    return replace(
        sample, phase_seconds=seconds, failure=None, error_text="", fingerprints=b"", orders=b"", findings=()
    )


def take_request_files(folder: Path, pattern: re.Pattern[str]) -> Iterator[str]:
    """Remove the request files in a folder one by one, and yield the group of `pattern` in each name."""
    with os.scandir(folder) as entries:
        for entry in entries:
            match = pattern.fullmatch(entry.name)
            if match is not None and stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                Path(entry.path).unlink()
                yield match[1]
