"""Commands for a running run: `paceline watch`, `hang`, `cancel`, and `join`, which adds this machine to a job."""

import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from paceline.checkpoint.manager import Checkpoints
from paceline.cli import make_parser, run_state
from paceline.cli.options import check_positive, print_json
from paceline.errors import ExitCode, TrainingError, UsageError
from paceline.guard.report import DiagnosisRecord, diagnosis_file, format_evidence, format_report, read_diagnosis
from paceline.launch.output import last_lines_range, read_lines
from paceline.launch.plan import SubmitRecord, read_last_submission
from paceline.launch.slurm import queue
from paceline.protocol.evidence import CHECKPOINT_ASK, Evidence
from paceline.protocol.job import GRACE_PERIOD_SECONDS, NodePlan
from paceline.report.live import LiveReader, RunSnapshot
from paceline.report.watch_lines import summary_line
from paceline.runs import writing
from paceline.runs.console import format_timestamp, remove_control_characters
from paceline.runs.folder import CHECKPOINTS, JOIN_FILE, LOCK
from paceline.runs.owners import UnreadableFileError
from paceline.runs.reading import list_names, read_file, read_json
from paceline.runs.summary import LIVE_STATES, StatusReport

END_POLL_SECONDS = 0.5
END_TIMEOUT_SECONDS = GRACE_PERIOD_SECONDS + 15.0
MAX_INVITATION_BYTES = 1 << 20  # of an invitation
# the coordinator looks for requests every second, and gives every rank three seconds to answer
ANSWER_TIMEOUT_SECONDS = 15.0
POLL_SECONDS = 0.1
RECENT_PROGRESS_SECONDS = 2.0  # a run that made progress within this time does not hang
MAX_SHOWN_OPS = 8
MOST_SHOWN, MOST_LINES, MAX_STACK_CHARS = 64, 200, 20_000  # ranks; lines and characters of each rank
STATE_SECONDS = 3.0  # between reads of the state, which may query the host of the agent
LINE_INTERVAL_SECONDS = 10.0  # between lines without a terminal
LOG_LINES = 40


@dataclass(frozen=True)
class CancelConfig(run_state.RunAccessConfig):
    """Stop a run after it has saved its state. The run does not requeue itself."""

    now: bool = False
    """stop immediately, without a checkpoint"""


@dataclass(frozen=True)
class JoinConfig(run_state.RunAccessConfig):
    """Add this machine as a node to a running job that was started with --nodes MIN:MAX and has fewer than MAX nodes.

    Run the command on the new node, in a folder from which RUN is the same folder as on the other nodes. The run
    saves its state after the current step and continues with one more node. Ctrl-C removes the node again after a
    step.
    """

    nproc: int | None = None
    """worker processes on this node (default: the --nproc of the run)"""


def cancel(arguments: Sequence[str]) -> int:
    config: CancelConfig = make_parser("cancel").parse(arguments)
    run_dir, access = run_state.resolve_run_access(config, act=True)
    state, details, *_ = run_state.read_run_status(run_dir, access)
    if state not in LIVE_STATES:
        details = f" ({details})" if details else ""
        print(remove_control_characters(f"there is nothing to cancel: the run is {state}{details}"), file=sys.stderr)
        return ExitCode.FAILED if state == "unknown" else ExitCode.DONE
    request_run_stop(run_dir, access, now=config.now)
    return _wait_for_end(run_dir, access)


def request_run_stop(run_dir: Path, access: run_state.RunAccess, *, now: bool = False) -> None:
    """Ask Slurm or the agent to end the run after it has saved, or `now` without saving. Do not wait for the end."""
    folder, submission = read_last_submission(run_state.run_folder_locked_by_agent(run_dir))
    slurm_job = submission.slurm_job if submission is not None else ""
    if slurm_job and (job := queue.query_job_state(slurm_job)) is not None and job.lives:
        if not queue.job_writes_to(slurm_job, folder):
            raise UsageError(code="slurm-job-of-another-run", slurm_job=slurm_job, folder=folder)
        queue.cancel(slurm_job, now=now)
    else:
        _stop_agent(run_dir, submission, access, now=now)


def _stop_agent(run_dir: Path, submission: SubmitRecord | None, access: run_state.RunAccess, *, now: bool) -> None:
    roster = run_state.read_coordinator_roster(run_dir)
    if roster is None or not run_state.is_agent_alive(run_dir, roster, submission, access):
        try:
            holder = read_file(run_dir / LOCK, limit_bytes=1000).decode(errors="replace").strip()
        except OSError:
            holder = "no process"
        agent = f"its agent is on {roster.host}, pid {roster.agent_pid}" if roster else ""
        raise TrainingError(code="cannot-stop-from-here", who=agent or f"it has no agent, and {holder} holds its lock")
    is_sent = run_state.signal_agent(run_dir, roster, submission, access)
    if now:  # a second signal makes the agent kill the workers immediately
        time.sleep(queue.SECOND_SIGNAL_SECONDS)
        is_sent = run_state.signal_agent(run_dir, roster, submission, access)
    if not is_sent:
        raise TrainingError(code="agent-unreachable", host=roster.host)


def _wait_for_end(run_dir: Path, access: run_state.RunAccess) -> int:
    print("stop requested; waiting for the run to end ...", file=sys.stderr, flush=True)
    deadline = time.monotonic() + END_TIMEOUT_SECONDS
    while (end := run_state.read_run_status(run_dir, access)).state in LIVE_STATES or run_state.is_locked(run_dir):
        if time.monotonic() > deadline:
            print(
                f"the run has not ended after {END_TIMEOUT_SECONDS:g} s: see paceline status {run_dir}", file=sys.stderr
            )
            return ExitCode.FAILED
        time.sleep(END_POLL_SECONDS)
    saved = Checkpoints(run_dir / CHECKPOINTS).entries()
    print(remove_control_characters(f"ended: {end.state}" + (f" ({end.details})" if end.details else "")))
    if not saved:
        print("no checkpoint was saved")
    elif end.state != "done":
        again = run_state.resume_command(run_dir)
        print(f"saved at step {saved[0].step}" + (f"; to resume: {again}" if again else ""))
    return ExitCode.DONE


def join_run(arguments: Sequence[str]) -> int:
    config: JoinConfig = make_parser("join").parse(arguments)
    check_positive(config, "nproc")
    # its plan is executed here: no other user may have written it
    run_dir, access = run_state.resolve_run_access(config, act=True)
    run = shlex.quote(str(run_dir))
    files = (attempt / JOIN_FILE for attempt in reversed(run_state.list_attempt_dirs(run_dir)))
    file = next(files, run_dir / JOIN_FILE)
    try:
        read_json(file, NodePlan, limit_bytes=MAX_INVITATION_BYTES, ours=True)
    except FileNotFoundError:
        state = run_state.read_run_status(run_dir, access).state
        if state in LIVE_STATES:
            why = "was not started with --nodes MIN:MAX, or is still starting"
        else:
            why = f"is {state}. Start it again with this node: paceline train --resume auto --run-dir {run} --hosts ..."
        raise UsageError(code="run-takes-no-hosts", run=run, why=why) from None
    except UnreadableFileError as error:
        raise UsageError(code="invitation-unreadable", reason=str(error)) from None
    options = ["--plan", str(file), "--join", *(("--nproc", str(config.nproc)) if config.nproc else ())]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "paceline.launch.agent", *options])


@dataclass(frozen=True)
class HangConfig(run_state.OptionalRunFlags):
    """Show which rank is blocking a run, with the stack of every rank. Exit code 0 for any result."""

    json: bool = False
    """print JSON"""


class HangReport(msgspec.Struct, frozen=True):
    """The output of `paceline hang --json`."""

    run_dir: str
    state: str  # as in `paceline status`
    live: bool  # True: the state at this moment; False: recorded when the run stalled
    message: str
    diagnosis_dir: str
    record: DiagnosisRecord | None


def hang(arguments: Sequence[str]) -> int:
    config: HangConfig = make_parser("hang").parse(arguments)
    report = _hang_report(*run_state.resolve_run_access(config))
    if config.json:
        print_json(report)
    else:
        _show_hang(report)
    return ExitCode.DONE


def _hang_report(run_dir: Path, access: run_state.RunAccess) -> HangReport:
    """A new diagnosis of the run's agent, if it runs, may be queried and answers. Otherwise the newest recorded one."""
    state = run_state.read_run_status(run_dir, access).state
    starts = run_state.list_attempt_dirs(run_dir)
    if not starts:
        raise UsageError(code="not-started", run_dir=run_dir)
    may_ask = bool(access)  # a request is a file, and paceline writes no file into a run of another user
    diagnosis = request_diagnosis(starts[-1]) if state == "running" and may_ask else None
    if diagnosis is not None:
        waited = f"{diagnosis.waited_seconds:.1f} s"
        line = f"no progress for {waited}. If this is a stall, its cause is:"
        if diagnosis.waited_seconds < RECENT_PROGRESS_SECONDS:
            line = f"the run is making progress (last {waited} ago). The present stacks of its ranks:"
        return HangReport(str(run_dir), state, True, line, "", diagnosis)
    state = run_state.read_run_status(run_dir, access).state  # it may have ended meanwhile
    silence = f"its agent has not answered within {ANSWER_TIMEOUT_SECONDS:g} s"
    no_answer = "" if state != "running" else silence if may_ask else "its agent was not queried"
    folder = _newest_diagnosis(run_dir)
    if folder is None:
        line = f"the run is {state}, and no stall was recorded" + (f"; {no_answer}" if no_answer else "")
        return HangReport(str(run_dir), state, False, line, "", None)
    diagnosis = read_diagnosis(folder)
    earlier = f"; {no_answer}: this report is from an earlier stall" if no_answer else ""
    line = f"{folder.parent.name}, {format_timestamp(diagnosis.unix_time) or 'at an unknown time'}{earlier}"
    return HangReport(str(run_dir), state, False, line, str(folder), diagnosis)


def _newest_diagnosis(run_dir: Path) -> Path | None:
    """The folder of the newest diagnosis of all attempts. Folders without a complete diagnosis are skipped."""
    for attempt in reversed(run_state.list_attempt_dirs(run_dir)):
        matches = (re.fullmatch(r"(?:diagnosis|verdict)-([0-9]{1,9})", name) for name in list_names(attempt))
        for _, name in sorted(((int(m[1]), m[0]) for m in matches if m), reverse=True):
            if os.path.lexists(diagnosis_file(attempt / name)):
                return attempt / name
    return None


def request_diagnosis(attempt: Path) -> DiagnosisRecord | None:
    """Request a diagnosis from the coordinator of a running attempt; None if it does not answer."""
    nonce = secrets.token_hex(8)
    question, answer = attempt / f"ask-{os.getpid()}-{nonce}", attempt / f"diagnosis-live-{nonce}"
    try:
        os.close(writing.create_file(question))
    except OSError as error:
        raise UsageError(code="run-cannot-be-asked", question=question, strerror=error.strerror) from error
    deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
    try:
        while not diagnosis_file(answer).is_file():
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)
        return read_diagnosis(answer)
    finally:
        with suppress(OSError):
            question.unlink(missing_ok=True)
        shutil.rmtree(answer, ignore_errors=True)  # no other process needs it


def _rank_text(evidence: Evidence, most_ops: int) -> str:
    """The evidence on a rank, with limits because a file of another user may contain any number of lines."""
    text = format_evidence(evidence, most_ops=most_ops, most_stacks=1)[:MAX_STACK_CHARS]
    return "\n".join(text.splitlines()[:MOST_LINES])


def _show_hang(report: HangReport) -> None:
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(report.message)
    if (record := report.record) is None:
        return
    causes = record.diagnosis.causes
    shown = sorted(record.evidence, key=lambda evidence: (evidence.rank not in causes, evidence.rank))[:MOST_SHOWN]
    if len(shown) < len(record.evidence):
        console.print(f"(showing {MOST_SHOWN} of {len(record.evidence)} ranks; the others are in the folder)")
    shown.sort(key=lambda evidence: evidence.rank)

    def print_block(text: str, style: str) -> None:
        headline, _, rest = text.partition("\n")
        console.print(f"\n{headline}", style=style)
        if rest:
            console.print(rest.rstrip("\n"))

    if not report.live or record.waited_seconds >= RECENT_PROGRESS_SECONDS:
        folder, waited_seconds = report.diagnosis_dir, record.waited_seconds
        text = format_report(record.diagnosis, shown, waited_seconds=waited_seconds, folder=folder, run="")
        print_block(text, "bold red")
    for evidence in shown:
        print_block(_rank_text(evidence, MAX_SHOWN_OPS), "bold red" if evidence.rank in causes else "bold")


@dataclass(frozen=True)
class WatchConfig(run_state.OptionalRunFlags):
    """Watch a run live, rank by rank, until it ends.

    Keys show stacks and logs, save a checkpoint and stop the run. q leaves the view; the run continues.
    """


def watch(arguments: Sequence[str]) -> int:
    config: WatchConfig = make_parser("watch").parse(arguments)
    run_dir, access = run_state.resolve_run_access(config)
    run = _Run(run_dir, access)
    try:
        if run.standing.state in LIVE_STATES:
            if sys.stdout.isatty() and sys.stdin.isatty():
                from paceline.report.watch_app import KeyActions, WatchApp  # textual takes a third of a second

                app = WatchApp(KeyActions(run.read_view, run.stack, run.log, run.save, run.stop, run.may_act))
                app.run()
                if app.failure is not None:
                    raise app.failure
            else:
                _print_changes(run)
        now, state = run.read_view()
    except KeyboardInterrupt:
        print("no longer watching; the run continues", file=sys.stderr)
        return ExitCode.DONE
    _say(summary_line(now, state))
    if state.state not in LIVE_STATES:
        _say(f"see paceline status {run_dir}")
    return ExitCode.DONE


class _Run:
    def __init__(self, run_dir: Path, access: run_state.RunAccess) -> None:
        self.run_dir, self.access, self.may_act = run_dir, access, bool(access)
        self._reader = LiveReader(run_dir, may_ask=self.may_act)
        self.standing = self._read_state()

    def read_view(self) -> tuple[RunSnapshot, StatusReport]:
        """The run now. Call it from one thread at a time."""
        if time.monotonic() > self._state_read + STATE_SECONDS:
            self.standing = self._read_state()
        return self._reader.read_snapshot(self._attempt), self.standing

    def _read_state(self) -> StatusReport:
        self._attempt = next(reversed(run_state.list_attempt_dirs(self.run_dir)), None)
        self._state_read = time.monotonic()
        return run_state.run_state(self.run_dir, self.access)

    def stack(self, rank: int) -> str:
        diagnosis = request_diagnosis(self._newest())
        if diagnosis is None:
            raise UsageError(
                "the agent of the run does not answer. Runs under torchrun and single-process runs have no agent"
            )
        evidence = next((evidence for evidence in diagnosis.evidence if evidence.rank == rank), None)
        return f"rank {rank} is not running" if evidence is None else _rank_text(evidence, 5)

    def log(self, rank: int) -> str:
        if self._attempt is None:
            return "nothing yet"
        path = self._attempt / f"rank-{rank}.log"
        start, end = last_lines_range(path, LOG_LINES)
        return "\n".join(line.text for line in read_lines(path, start, end))[-MAX_STACK_CHARS:] or "nothing yet"

    def save(self) -> str:
        if self._reader.read_snapshot(self._attempt).step is None:
            raise UsageError("cannot request a checkpoint: the run has no step yet, or its script saves by itself")
        try:
            os.close(writing.create_file(self._newest() / f"{CHECKPOINT_ASK}{secrets.token_hex(8)}"))
        except OSError as error:
            raise UsageError(f"cannot request a checkpoint: {error.strerror}") from error
        return "checkpoint requested: the run saves after the next step"

    def stop(self) -> str:
        self._newest()
        request_run_stop(self.run_dir, self.access)
        return "stop requested: the run saves its state first"

    def _newest(self) -> Path:
        if not self.may_act or self._attempt is None:
            raise UsageError("other users could have written this run folder, so paceline only displays the run")
        return self._attempt


def _print_changes(run: _Run) -> None:
    """Without a terminal: print a line after each change, at most every ten seconds, until the end."""
    shown = ""
    while run.standing.state in LIVE_STATES:
        line = summary_line(*run.read_view())
        if line != shown:
            shown = line
            _say(line)
        due = time.monotonic() + LINE_INTERVAL_SECONDS
        while time.monotonic() < due and run.standing.state in LIVE_STATES:
            time.sleep(1.0)
            run.read_view()


def _say(line: str) -> None:
    print(remove_control_characters(line), flush=True)
