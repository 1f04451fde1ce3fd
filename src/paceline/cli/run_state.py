"""Find a run, its owner, its agent and its state.

paceline only displays a run of another user: it signals no process, queries no node, and writes no file for it. The
modules for settings and Slurm are imported only for a state, since many commands only find a run.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.checkpoint.manager import Checkpoints
from paceline.cli.options import parse_shell_command, ssh_argv
from paceline.errors import ExitCode, PacelineError, UsageError, first_few, unknown_name_error
from paceline.host.cleanup import Roster, roster_path
from paceline.host.procfs import PROC
from paceline.launch.plan import SubmitRecord, read_last_submission, submit_number
from paceline.protocol.evidence import SUCCESS_EXIT_CODES
from paceline.report.live import recent_rates
from paceline.runs.attempt import read_attempt_end, read_nodes, read_notices
from paceline.runs.console import print_to_stderr
from paceline.runs.events import Evaluated, Event, FlopsCounted, Started, Step, last_events, read_events
from paceline.runs.folder import CHECKPOINTS, CONFIG, LOCK, attempt_dirs, attempt_number, failure_file_names
from paceline.runs.owners import check_owned_by_us, open_file, warn_if_shared
from paceline.runs.reading import is_folder, list_folders, list_names, read_json, real_path
from paceline.runs.summary import LIVE_STATES, State, StatusReport, Summary, read_summary
from paceline.runs.utilization import goodput, throughput_and_mfu

if TYPE_CHECKING:
    from paceline.config.settings import TrainConfig
    from paceline.launch.slurm import queue

RUNS = Path("runs")
SSH_SECONDS = 20.0
WINDOW_STEPS = 50
FIRST_EVENTS = 100  # they contain the first step and the events that follow it
RANK_0_EVENTS_NAME = "events-0.jsonl"
MOST_SCORES, MOST_CHARS = 20, 2000  # limits of the output: texts in a run folder may have any length


@dataclass(frozen=True)
class RunAccessConfig:
    """Access to the run."""

    run: str
    """run folder, or the beginning of its name under runs/"""
    ssh: str = "ssh"
    """ssh command to reach the nodes of the run, as for `paceline train`; commands in the folder are not run"""
    trust: bool = False
    """use a run folder that another user owns or could have written, and trust all of it"""


@dataclass(frozen=True)
class OptionalRunFlags(RunAccessConfig):
    """Access to the run."""

    run: str = ""
    """run folder, or the beginning of its name under runs/ (default: the newest there)"""


RunAccess = tuple[str, ...]
"""The ssh command to reach the nodes of a run. Empty: show only what is in its folder."""
NO_ACCESS: RunAccess = ()


def find_run(asked: str) -> Path:
    """The folder of a run, from a path or a unique prefix of a name under runs/."""
    path = Path(asked)
    if not is_folder(path):
        runs = list_folders(real_path(RUNS))  # follow no link: another user could point it at a different run of ours
        matches = [name for name in runs if name == asked] or [name for name in runs if name.startswith(asked)]
        if not asked or not matches:
            allowed = runs[-20:] or ["(no folder runs/ here: specify the folder of the run)"]
            raise unknown_name_error("run", asked, allowed)
        if len(matches) > 1:
            raise UsageError(code="run-ambiguous", value=asked, count=len(matches), allowed=matches[-20:])
        path = RUNS / matches[0]
    path = real_path(path)
    if not is_run_folder(path):
        raise UsageError(code="not-a-run-folder", asked=asked, config=CONFIG)
    return path


def newest_run() -> Path:
    """The folder of the newest run in runs/, by modification time. Prints the folder."""
    runs = [path for name in list_folders(real_path(RUNS)) if is_run_folder(path := real_path(RUNS / name))]
    if not runs:
        raise UsageError(code="no-run-here")
    newest = max(runs, key=lambda path: path.stat().st_mtime_ns)
    print_to_stderr(f"the newest run is {newest}")
    return newest


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is a run folder: it contains settings, an attempt or a submit folder."""
    files = list_names(folder)
    return CONFIG in files or any(attempt_number(Path(name)) or submit_number(Path(name)) for name in files)


def resolve_run_access(config: RunAccessConfig, *, act: bool = False) -> tuple[Path, RunAccess]:
    """The folder of a run, and the allowed access to it.

    If other users could have written the folder, paceline prints that and allows no access, or with `act` raises an
    error.
    """
    run_dir = find_run(config.run) if config.run or act else newest_run()
    for folder in () if config.trust else dict.fromkeys((run_dir, run_folder_locked_by_agent(run_dir))):
        if act:
            check_owned_by_us(folder)
        elif warn_if_shared(folder):
            return run_dir, NO_ACCESS
    return run_dir, parse_shell_command("--ssh", config.ssh)


def list_attempt_dirs(run_dir: Path) -> list[Path]:
    return [*attempt_dirs(run_dir).values()]


def run_folder_locked_by_agent(run_dir: Path) -> Path:
    """The run folder that the agent of the newest attempt has locked: for a session, that of `paceline launch`."""
    return next((attempt.parent for attempt in list_attempt_dirs(run_dir)[-1:]), run_dir)


def is_locked(run_dir: Path) -> bool:
    """Whether a process holds the lock of the run, on this node or on another one that shares the folder."""
    try:
        with open_file(run_dir / LOCK) as lock:
            fcntl.flock(lock.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two observers do not conflict
    except BlockingIOError:
        return True
    except OSError:  # no lock file, or a file system without locks
        return False
    return False


def read_coordinator_roster(run_dir: Path) -> Roster | None:
    for attempt in list_attempt_dirs(run_dir)[-1:]:
        with suppress(OSError):
            return read_json(roster_path(attempt), Roster)
    return None


def is_agent_alive(run_dir: Path, roster: Roster, submission: SubmitRecord | None, access: RunAccess) -> bool | None:
    """Whether this agent still runs, and so holds the lock of the run; None if its node cannot be queried."""
    if roster.host == os.uname().nodename:
        return _holds_lock(roster.agent_pid, run_dir)
    done = _run_on_coordinator(submission, access, f"uname -n; cat /proc/{roster.agent_pid}/stat || true")
    host, _, stat = (done or "").partition("\n")
    if host.strip() != roster.host:
        return None
    fields = stat.rpartition(")")[2].split()  # see host/procfs.py
    return len(fields) > 19 and fields[0] not in "ZX" and fields[19] == str(roster.agent_started)


def signal_agent(run_dir: Path, roster: Roster, submission: SubmitRecord | None, access: RunAccess) -> bool:
    """Send SIGTERM to the agent, if it holds the lock of this run. Returns whether its node could be reached."""
    if roster.host == os.uname().nodename:
        with suppress(ProcessLookupError):  # the agent has just ended
            handle = os.pidfd_open(roster.agent_pid)  # so the checked process is the one that gets the signal
            try:
                if not _holds_lock(roster.agent_pid, run_dir):
                    raise _not_its_agent(roster, run_dir)
                signal.pidfd_send_signal(handle, signal.SIGTERM)
            finally:
                os.close(handle)
        return True
    lock = shlex.quote(str(run_folder_locked_by_agent(run_dir) / LOCK))
    command = f'for file in /proc/{roster.agent_pid}/fd/*; do if [ "$file" -ef {lock} ]; then '
    command += f"kill -TERM {roster.agent_pid}; echo sent; exit 0; fi; done; "
    done = _run_on_coordinator(submission, access, f"{command}test -d /proc/{roster.agent_pid} || echo sent")
    if done is not None and done.strip() != "sent":
        raise _not_its_agent(roster, run_dir)
    return done is not None


def _not_its_agent(roster: Roster, run_dir: Path) -> UsageError:
    return UsageError(code="agent-of-another-run", agent_pid=roster.agent_pid, host=roster.host, lock=run_dir / LOCK)


def _holds_lock(pid: int, run_dir: Path) -> bool:
    """Whether a process has the lock file of the run open. Only processes of the run have."""
    try:
        with open_file(run_folder_locked_by_agent(run_dir) / LOCK) as lock:
            lock_file = (lock.status.st_dev, lock.status.st_ino)
        open_files = [*(PROC / str(pid) / "fd").iterdir()]
    except OSError:  # no such process, or it belongs to another user
        return False
    for link in open_files:
        with suppress(OSError):
            if ((file := link.stat()).st_dev, file.st_ino) == lock_file:
                return True
    return False


def _run_on_coordinator(submission: SubmitRecord | None, access: RunAccess, command: str) -> str | None:
    if not access or submission is None or submission.on != "ssh" or not submission.hosts:
        return None
    argv = ssh_argv(access, submission.hosts[0], f"sh -c {shlex.quote(command)}")
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SSH_SECONDS,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


class RunStatus(NamedTuple):
    state: State
    details: str  # details of the state
    submission: SubmitRecord | None
    job: queue.JobState | None


class _Progress(NamedTuple):
    """The progress of rank 0 from its events: the newest start, the last steps since then, the newest metrics."""

    started: Started | None = None
    steps: tuple[Step, ...] = ()
    metrics: dict[str, float] = {}  # noqa: RUF012 - never modified
    counted: FlopsCounted | None = None


def run_state(run_dir: Path, access: RunAccess = NO_ACCESS) -> StatusReport:
    current = read_run_status(run_dir, access)
    submission = current.submission
    saved = Checkpoints(run_dir / CHECKPOINTS).entries()
    # a live run has the summary of an earlier attempt
    summary = (None if current.state in LIVE_STATES else read_summary(run_dir)) or Summary("", 0)
    progress = _progress(run_dir) if summary.steps is None else _Progress()
    starts = list_attempt_dirs(run_dir)
    nodes = read_nodes(starts[-1]) if starts and current.state in LIVE_STATES else None
    last_written = next(p for p in (run_dir / RANK_0_EVENTS_NAME, *starts[-1:], run_dir) if os.path.lexists(p))
    return StatusReport(
        run_dir=str(run_dir), state=current.state, words=current.details[:MOST_CHARS],
        on=submission.on if submission is not None else "local", hosts=_hosts(submission, current.job, run_dir),
        nodes=nodes.format_line[:MOST_CHARS] if nodes is not None else "",
        slurm_job=submission.slurm_job if submission is not None else "", attempts=len(starts),
        **_speed(run_dir, progress, running=current.state == "running", summary=summary),
        checkpoint_step=saved[0].step if saved else None,
        found=tuple(notice.words for notice in islice(read_notices(starts[-1]), MOST_SCORES)) if starts else (),
        unix_time=last_written.lstat().st_mtime, **_progress_fields(summary, _settings(run_dir), progress),
    )  # fmt: skip


def _speed(run_dir: Path, progress: _Progress, *, running: bool, summary: Summary) -> dict[str, float | None]:
    if not running:
        speeds = {"tokens_per_second": summary.tokens_per_second, "mfu": summary.mfu}
        return speeds | {"goodput": summary.goodput or goodput(run_dir)}
    steps, counted = progress.steps, progress.counted or FlopsCounted(0.0, 0)
    tokens = sum(step.tokens for step in steps) / max(1, sum(step.consumed for step in steps))
    rate, *_ = recent_rates(steps)
    speeds = throughput_and_mfu(rate, tokens, counted.flops_per_sample, counted.peak_tflops, counted.devices)
    speeds.pop("flops_per_second", None)
    return speeds | {"goodput": goodput(run_dir, time.time())}


def _progress_fields(summary: Summary, settings: TrainConfig, progress: _Progress) -> dict[str, Any]:
    started, steps, run = progress.started, progress.steps, settings.run
    start_step = started.start_step or None if started else None
    step = summary.steps if summary.steps is not None else steps[-1].step if steps else start_step
    epoch_steps = started.steps_per_epoch if started else round((summary.steps or 0) / (summary.epochs or 1))
    metrics = summary.test_metrics or progress.metrics
    return {
        "step": step,
        "total_steps": run.steps or run.epochs * epoch_steps or None,
        "epochs": step / epoch_steps if step and epoch_steps else None,
        "task": (summary.task or settings.task or "")[:MOST_CHARS],
        "strategy": (summary.strategy or settings.strategy or "")[:MOST_CHARS],
        "world_size": summary.world_size or (started.world_size if started else None),
        "metrics": {name[:MOST_CHARS]: metrics[name] for name in islice(metrics, MOST_SCORES)},
    }


def _slurm_job(submission: SubmitRecord | None, access: RunAccess) -> tuple[queue.JobState | None, str]:
    """The state of the run's Slurm job, and the reason if the job could not be queried."""
    if submission is None or not submission.slurm_job:
        return None, ""
    if not access:
        return None, f"Slurm job {submission.slurm_job} was not queried"
    from paceline.launch.slurm import queue

    try:
        return queue.query_job_state(submission.slurm_job), ""
    except PacelineError as error:
        return None, str(error)


def read_run_status(run_dir: Path, access: RunAccess = NO_ACCESS) -> RunStatus:
    """The state of a run without its progress. This is cheaper than `run_state`, for commands that poll."""
    _, submission = read_last_submission(run_folder_locked_by_agent(run_dir))
    job, not_queried = _slurm_job(submission, access)
    state, details = _determine_state(run_dir, submission, job, not_queried, access)
    return RunStatus(state, details, submission, job)


def _determine_state(
    run_dir: Path, submission: SubmitRecord | None, job: queue.JobState | None, not_queried: str, access: RunAccess
) -> tuple[State, str]:
    if job is not None and job.lives:
        return ("queued" if job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD") else "running"), str(job)
    if is_locked(run_dir):
        return "running", ""
    roster = read_coordinator_roster(run_dir)
    is_alive = is_agent_alive(run_dir, roster, submission, access) if roster is not None else False
    if is_alive:
        return "running", ""
    newest = next(reversed(list_attempt_dirs(run_dir)), None)
    summary = read_summary(run_dir)
    ended = read_attempt_end(newest) if newest else None
    if summary is not None:
        # For a session under `paceline launch`, rank 0 wrote the summary, but another rank may have failed first
        last = ended if ended is not None and not {summary.exit, ended.exit} & {*SUCCESS_EXIT_CODES} else summary
        return _state_of(last.exit, (ended.words if ended else "") or summary.failure or "")
    if ended is not None and ended.words:
        return _state_of(ended.exit, ended.words)
    if job is not None:
        return ("cancelled", str(job)) if job.state == "CANCELLED" else _state_of(job.exit_code, f"Slurm: {job}")
    if ended is not None:
        return _state_of(ended.exit, "")
    if newest and (records := failure_file_names(newest)):
        return "failed", f"its agent ended without a diagnosis; see {newest}/{first_few(records, 1)}"
    if not_queried:
        return "unknown", not_queried
    if is_alive is None and roster is not None:
        return "unknown", f"its agent is on {roster.host}, which {_why_not_queried(submission, access)}"
    if roster is not None or newest:
        return "lost", "it ended without a report: it was killed, or its node was switched off"
    return "not started", ""


def _state_of(code: int, details: str) -> tuple[State, str]:
    if code in (ExitCode.DONE, ExitCode.SAVED):
        return ("done", "") if code == ExitCode.DONE else ("saved", "stopped after saving, ready to be resumed")
    return "failed", f"exit code {code}" + (f": {details}" if details else "")


def _why_not_queried(submission: SubmitRecord | None, access: RunAccess) -> str:
    if not access:
        return "was not queried"
    reason = "cannot be reached from here"
    if submission is not None and submission.ssh not in ((), access):
        command = shlex.join(submission.ssh)
        reason += f". The run was started with --ssh {command!r}: pass it again, paceline runs no command from a file"
    return reason


def _hosts(submission: SubmitRecord | None, job: queue.JobState | None, run_dir: Path) -> tuple[str, ...]:
    if job is not None and job.nodes:
        return (job.nodes,)
    if submission is not None and submission.hosts:
        return submission.hosts
    roster = read_coordinator_roster(run_dir)
    return (roster.host,) if roster is not None else ()


def _progress(run_dir: Path) -> _Progress:
    path, newest = run_dir / RANK_0_EVENTS_NAME, list[Event]()
    with suppress(OSError):
        newest = [*last_events(path)]
    since_start = takewhile(lambda event: not isinstance(event, Started), newest)
    steps = [*islice((event for event in since_start if isinstance(event, Step)), WINDOW_STEPS + 1)]
    metrics = next((event.metrics for event in newest if isinstance(event, Evaluated) and event.metrics), {})
    if newest and not any(isinstance(event, Started) for event in newest):
        newest += reversed([*islice(read_events(path), FIRST_EVENTS)])  # a start at the beginning has the same values
    started = next((event for event in newest if isinstance(event, Started)), None)
    counted = next((event for event in newest if isinstance(event, FlopsCounted)), None)
    return _Progress(started, tuple(reversed(steps)), metrics, counted)


def _settings(run_dir: Path) -> TrainConfig:
    from paceline.config.settings import TrainConfig, load

    try:
        return load(run_dir / CONFIG, must_own=False)
    except UsageError:  # missing, or written by a different version
        return TrainConfig()


def resume_command(run_dir: Path) -> str:
    """The command that resumes a run; empty for a script that loads its state itself."""
    from paceline.config.settings import load
    from paceline.tasks.registry import is_session_script

    if not os.path.lexists(run_dir / CONFIG):
        return ""
    with suppress(PacelineError, OSError):
        task = load(run_dir / CONFIG, must_own=False).task
        if task is not None and is_session_script(task):
            return f"start {task} again, with session(..., resume=True)"
    return f"paceline train --resume auto --run-dir {shlex.quote(str(run_dir))}"
