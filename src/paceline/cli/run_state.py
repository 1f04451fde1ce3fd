"""Finds the run that is meant, who owns it, whether its agent still runs, and how it stands.

A run of another user is only shown: no process is signalled, no host is asked, and nothing is written for it.
Settings, checkpoints and Slurm are imported only when a state is asked for: many commands only find a run.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.cli.options import command_words, ssh_command
from paceline.errors import ExitCode, PacelineError, UsageError, first_few, unknown
from paceline.host.procfs import PROC, read_process
from paceline.host.sweep import Roster, roster_path
from paceline.launch.plan import Submission, last_submission, submit_number
from paceline.protocol.evidence import GOOD_ENDS
from paceline.report.live import rates
from paceline.runs.attempt import read_ended, read_nodes, read_notices
from paceline.runs.console import say
from paceline.runs.events import Counted, Evaluated, Started, Step, last_events, read_events
from paceline.runs.folder import CHECKPOINTS, CONFIG, LOCK, attempt_number, failure_records, numbered_attempts
from paceline.runs.owners import check_ours, open_file, warn_if_shared
from paceline.runs.reading import decode, folders, is_folder, names, real_path
from paceline.runs.summary import LIVE, RunState, State, Summary, read_summary
from paceline.runs.utilization import goodput, speed

if TYPE_CHECKING:
    from paceline.config.settings import TrainConfig
    from paceline.launch.slurm import queue

RUNS = Path("runs")
SSH_SECONDS = 20.0
WINDOW_STEPS = 50
FIRST_EVENTS = 100  # which hold the first step, and what is written down after it
EVENTS = "events-0.jsonl"
MOST_SCORES, MOST_CHARS = 20, 2000  # that are shown: texts in a folder may have any length


@dataclass(frozen=True)
class RunFlags:
    """Access to the run."""

    run: str
    """run folder, or the beginning of its name under runs/"""
    ssh: str = "ssh"
    """ssh command to reach the hosts of the run, as for `paceline train`; commands in the folder are not run"""
    trust: bool = False
    """use a run folder that another user owns or could have written, and trust all of it"""


@dataclass(frozen=True)
class NewestRunFlags(RunFlags):
    """Access to the run."""

    run: str = ""
    """run folder, or the beginning of its name under runs/ (default: the newest there)"""


@dataclass(frozen=True)
class Access:
    """What may be asked about a run besides its folder: nothing about a run of another user."""

    ssh: tuple[str, ...] = ()
    slurm: bool = False


NOTHING = Access()


def find_run(asked: str) -> Path:
    """The folder of a run: a path, or the beginning of a name under runs/ that only one has.

    Raises:
        UsageError: if there is none, several, or the folder holds no run.
    """
    path = Path(asked)
    if not is_folder(path):
        runs = folders(real_path(RUNS))  # through no link: others could point it at another run of ours
        matches = [name for name in runs if name == asked] or [name for name in runs if name.startswith(asked)]
        if not asked or not matches:
            raise unknown("run", asked, runs[-20:] or ["(no folder runs/ here: name the run's folder)"])
        if len(matches) > 1:
            raise UsageError(code="run-ambiguous", value=asked, count=len(matches), allowed=matches[-20:])
        path = RUNS / matches[0]
    path = real_path(path)
    if not holds_run(path):
        raise UsageError(code="not-a-run-folder", asked=asked, config=CONFIG)
    return path


def newest_run() -> Path:
    """The folder of the run in runs/ that was started or changed last; prints it.

    Raises:
        UsageError: if there is none.
    """
    runs = [path for name in folders(real_path(RUNS)) if holds_run(path := real_path(RUNS / name))]
    if not runs:
        raise UsageError(code="no-run-here")
    newest = max(runs, key=lambda path: path.stat().st_mtime_ns)
    say(f"the newest run is {newest}")
    return newest


def holds_run(folder: Path) -> bool:
    """Whether a folder is a run's: its settings are there, or a start of it.

    Raises:
        Unreadable: we may not know, or it holds too much.
    """
    there = names(folder)
    return CONFIG in there or any(attempt_number(Path(name)) or submit_number(Path(name)) for name in there)


def existing_run(config: RunFlags, *, act: bool = False) -> tuple[Path, Access]:
    """The folder of a run, and what may be asked about it: nothing where others could have written it, which is said.

    Raises:
        UsageError: if there is no such run; with `act`, if none is named or others could have written it.
    """
    run_dir = find_run(config.run) if config.run or act else newest_run()
    for folder in () if config.trust else dict.fromkeys((run_dir, home(run_dir))):
        if act:
            check_ours(folder)
        elif warn_if_shared(folder):
            return run_dir, NOTHING
    return run_dir, Access(command_words("--ssh", config.ssh), slurm=True)


def attempts(run_dir: Path) -> list[Path]:
    """The folders of a run's starts, the newest last."""
    return [*numbered_attempts(run_dir).values()]


def home(run_dir: Path) -> Path:
    """The run folder that the agent of the newest start has locked: that of `paceline launch` for a session's."""
    return next((attempt.parent for attempt in attempts(run_dir)[-1:]), run_dir)


def is_locked(run_dir: Path) -> bool:
    """Whether a process, here or on any machine that shares the folder, holds the run."""
    try:
        with open_file(run_dir / LOCK) as lock:
            fcntl.flock(lock.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two lookers do not see each other
    except BlockingIOError:
        return True
    except OSError:  # there is none, or a file system without locks
        return False
    return False


def head_roster(run_dir: Path) -> Roster | None:
    """What node 0's agent of the newest start has written about itself."""
    for attempt in attempts(run_dir)[-1:]:
        with suppress(OSError):
            return decode(roster_path(attempt), Roster)
    return None


def agent_runs(run_dir: Path, roster: Roster, submission: Submission | None, ssh: Sequence[str]) -> bool | None:
    """Whether this agent still runs, and so holds the run's lock, on its host; None: nobody can say.

    `submission` says where its host is, `ssh` is the caller's command to ask there with; empty: no other host is asked.
    """
    if roster.host == os.uname().nodename:
        process = read_process(roster.agent_pid)
        same = process is not None and process.runs and process.start == roster.agent_started
        return same and _holds(roster.agent_pid, run_dir)
    done = _on_head(submission, ssh, f"uname -n; cat /proc/{roster.agent_pid}/stat || true")
    host, _, stat = (done or "").partition("\n")
    if host.strip() != roster.host:
        return None
    fields = stat.rpartition(")")[2].split()  # as host/procfs.py reads them
    return len(fields) > 19 and fields[0] not in "ZX" and fields[19] == str(roster.agent_started)


def signal_agent(run_dir: Path, roster: Roster, submission: Submission | None, ssh: Sequence[str]) -> bool:
    """Send SIGTERM to an agent that `agent_runs` and holds the run's lock; whether that was possible.

    Raises:
        UsageError: the process that the roster names does not hold this run: it is something else.
    """
    if roster.host == os.uname().nodename:
        with suppress(ProcessLookupError):  # it has just ended: all is well
            handle = os.pidfd_open(roster.agent_pid)  # the process that is checked next is the one that gets the signal
            try:
                if not _holds(roster.agent_pid, run_dir):
                    raise _not_its_agent(roster, run_dir)
                signal.pidfd_send_signal(handle, signal.SIGTERM)
            finally:
                os.close(handle)
        return True
    lock = shlex.quote(str(home(run_dir) / LOCK))
    done = _on_head(
        submission,
        ssh,
        f'for file in /proc/{roster.agent_pid}/fd/*; do if [ "$file" -ef {lock} ]; then '
        f"kill -TERM {roster.agent_pid}; echo told; exit 0; fi; done; test -d /proc/{roster.agent_pid} || echo told",
    )
    if done is not None and done.strip() != "told":
        raise _not_its_agent(roster, run_dir)
    return done is not None


def _not_its_agent(roster: Roster, run_dir: Path) -> UsageError:
    return UsageError(code="agent-of-another-run", agent_pid=roster.agent_pid, host=roster.host, lock=run_dir / LOCK)


def _holds(pid: int, run_dir: Path) -> bool:
    """Whether a process has the lock of the run open, which only its own processes have."""
    try:
        with open_file(home(run_dir) / LOCK) as lock:
            wanted = (lock.found.st_dev, lock.found.st_ino)
        held = [*(PROC / str(pid) / "fd").iterdir()]
    except OSError:  # there is none; or the process is another user's
        return False
    for link in held:
        with suppress(OSError):
            if ((it := link.stat()).st_dev, it.st_ino) == wanted:
                return True
    return False


def _on_head(submission: Submission | None, ssh: Sequence[str], command: str) -> str | None:
    """What a shell command prints on node 0's host; None if it cannot be reached."""
    if not ssh or submission is None or submission.on != "ssh" or not submission.hosts:
        return None
    argv = ssh_command(ssh, submission.hosts[0], f"sh -c {shlex.quote(command)}")
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SSH_SECONDS,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


class Standing(NamedTuple):
    """Whether a run runs or how it has ended, and what that was judged by."""

    state: State
    words: str  # more about the state
    submission: Submission | None
    job: queue.JobState | None


class _Progress(NamedTuple):
    """How far rank 0 has come, by its events: its newest start, the last steps since then, the newest scores."""

    started: Started | None = None
    steps: tuple[Step, ...] = ()
    metrics: dict[str, float] = {}  # noqa: RUF012 - never changed
    counted: Counted | None = None


def run_state(run_dir: Path, access: Access = NOTHING) -> RunState:
    """The state of a run, now.

    Raises:
        PacelineError: if a part of it cannot be read.
    """
    from paceline.checkpoint.manager import Checkpoints

    found = standing(run_dir, access)
    submission = found.submission
    saved = Checkpoints(run_dir / CHECKPOINTS).entries()
    summary = None if found.state in LIVE else read_summary(run_dir)  # that of a start before this one
    told = summary is not None and summary.steps is not None  # events then have nothing to add
    progress = _Progress() if told else _progress(run_dir)
    starts = attempts(run_dir)
    nodes = read_nodes(starts[-1]) if starts and found.state in LIVE else None
    last_sign = next(p for p in (run_dir / EVENTS, *starts[-1:], run_dir) if os.path.lexists(p))
    return RunState(
        run_dir=str(run_dir),
        state=found.state,
        words=found.words[:MOST_CHARS],
        on=submission.on if submission is not None else "local",
        hosts=_hosts(submission, found.job, run_dir),
        nodes=nodes.line[:MOST_CHARS] if nodes is not None else "",
        slurm_job=submission.slurm_job if submission is not None else "",
        attempts=len(starts),
        **_speed(run_dir, progress, running=found.state == "running", summary=summary or Summary("", 0)),
        checkpoint_step=saved[0].step if saved else None,
        found=tuple(one.words for one in islice(read_notices(starts[-1]), MOST_SCORES)) if starts else (),
        unix_time=last_sign.lstat().st_mtime,
        **_reached(summary or Summary("", 0), _settings(run_dir), progress),
    )


def _speed(run_dir: Path, progress: _Progress, *, running: bool, summary: Summary) -> dict[str, float | None]:
    """Of the last steps of a run that is running; of the whole run when it has ended."""
    if not running:
        known = {"tokens_per_second": summary.tokens_per_second, "mfu": summary.mfu}
        return known | {"goodput": summary.goodput or goodput(run_dir)}
    steps, counted = progress.steps, progress.counted or Counted(0.0, 0)
    tokens = sum(step.tokens for step in steps) / max(1, sum(step.consumed for step in steps))
    known = speed(rates(steps)[0], tokens, counted.flops_per_sample, counted.peak_tflops, counted.devices)
    known.pop("flops_per_second", None)
    return known | {"goodput": goodput(run_dir, time.time())}


def _reached(summary: Summary, settings: TrainConfig, progress: _Progress) -> dict[str, Any]:
    """What a run is, and how far it has come: by its summary, or else by its events."""
    started, steps, run = progress.started, progress.steps, settings.run
    begun = started.start_step or None if started else None
    step = summary.steps if summary.steps is not None else steps[-1].step if steps else begun
    an_epoch = started.steps_per_epoch if started else round((summary.steps or 0) / (summary.epochs or 1))
    metrics = summary.test_metrics or progress.metrics
    return {
        "step": step,
        "total_steps": run.steps or run.epochs * an_epoch or None,
        "epochs": step / an_epoch if step and an_epoch else None,
        "task": (summary.task or settings.task or "")[:MOST_CHARS],
        "strategy": (summary.strategy or settings.strategy or "")[:MOST_CHARS],
        "world_size": summary.world_size or (started.world_size if started else None),
        "metrics": {name[:MOST_CHARS]: metrics[name] for name in islice(metrics, MOST_SCORES)},
    }


def _slurm_job(submission: Submission | None, access: Access) -> tuple[queue.JobState | None, str]:
    """What Slurm says of a run's job, or why it says nothing."""
    if submission is None or not submission.slurm_job:
        return None, ""
    if not access.slurm:
        return None, f"Slurm is not asked about job {submission.slurm_job}"
    from paceline.launch.slurm import queue

    try:
        return queue.state(submission.slurm_job), ""
    except PacelineError as error:
        return None, str(error)


def standing(run_dir: Path, access: Access = NOTHING) -> Standing:
    """Only whether a run runs or how it has ended: cheaper than `run_state`, for a command that waits.

    Raises:
        PacelineError: if a part of it cannot be read.
    """
    _, submission = last_submission(home(run_dir))
    job, unheard = _slurm_job(submission, access)
    state, words = _judged(run_dir, submission, job, unheard, access)
    return Standing(state, words, submission, job)


def _judged(
    run_dir: Path, submission: Submission | None, job: queue.JobState | None, unheard: str, access: Access
) -> tuple[State, str]:
    if job is not None and job.lives:
        return ("queued" if job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD") else "running"), str(job)
    if is_locked(run_dir):
        return "running", ""
    roster = head_roster(run_dir)
    alive = agent_runs(run_dir, roster, submission, access.ssh) if roster is not None else False
    if alive:
        return "running", ""
    newest = next(reversed(attempts(run_dir)), None)
    summary = read_summary(run_dir)
    ended = read_ended(newest) if newest else None
    if summary is not None:
        # of a session under `paceline launch` rank 0 wrote the summary, and perhaps another rank failed first
        judged = ended if ended is not None and not {summary.exit, ended.exit} & {*GOOD_ENDS} else summary
        return _of_code(judged.exit, (ended.words if ended else "") or summary.failure or "")
    if ended is not None and ended.words:
        return _of_code(ended.exit, ended.words)
    if job is not None:
        return ("cancelled", str(job)) if job.state == "CANCELLED" else _of_code(job.exit_code, f"Slurm: {job}")
    if ended is not None:
        return _of_code(ended.exit, "")
    if newest and (records := failure_records(newest)):
        return "failed", f"its agent ended without a verdict; see {newest}/{first_few(records, 1)}"
    if unheard:
        return "unknown", unheard
    if alive is None and roster is not None:
        return "unknown", f"{roster.host}, where its agent is, {_unasked(submission, access)}"
    if roster is not None or newest:
        return "lost", "it ended without a word: killed, or its machine was switched off"
    return "not started", ""


def _of_code(code: int, words: str) -> tuple[State, str]:
    if code in (ExitCode.DONE, ExitCode.SAVED):
        return ("done", "") if code == ExitCode.DONE else ("saved", "stopped in good order, ready to be resumed")
    return "failed", f"exit code {code}" + (f": {words}" if words else "")


def _unasked(submission: Submission | None, access: Access) -> str:
    if not access.ssh:
        return "is not asked"
    words = "cannot be reached from here"
    if submission is not None and submission.ssh not in ((), access.ssh):
        words += f". It was started with --ssh {shlex.join(submission.ssh)!r}: type that again, no file's words are run"
    return words


def _hosts(submission: Submission | None, job: queue.JobState | None, run_dir: Path) -> tuple[str, ...]:
    if job is not None and job.nodes:
        return (job.nodes,)
    if submission is not None and submission.hosts:
        return submission.hosts
    roster = head_roster(run_dir)
    return (roster.host,) if roster is not None else ()


def _progress(run_dir: Path) -> _Progress:
    started: Started | None = None
    counted: Counted | None = None
    steps: list[Step] = []
    metrics: dict[str, float] = {}
    with suppress(OSError):
        for event in last_events(run_dir / EVENTS):
            if isinstance(event, Started):
                started = started or event
            elif isinstance(event, Evaluated):
                metrics = metrics or event.metrics
            elif isinstance(event, Counted):
                counted = counted or event
            elif isinstance(event, Step) and started is None and len(steps) <= WINDOW_STEPS:
                steps.append(event)
            if metrics and (started is not None or (counted and len(steps) > WINDOW_STEPS)):
                break
        if started is None:  # too long ago: the first one says as much of the run
            first = [*islice(read_events(run_dir / EVENTS), FIRST_EVENTS)]
            started = first[0] if first and isinstance(first[0], Started) else None
            counted = counted or next((event for event in first if isinstance(event, Counted)), None)
    return _Progress(started, tuple(reversed(steps)), metrics, counted)


def _settings(run_dir: Path) -> TrainConfig:
    from paceline.config.settings import TrainConfig, load

    try:
        return load(run_dir / CONFIG, ours=False)
    except UsageError:  # not there yet, or another version's
        return TrainConfig()


def resume_command(run_dir: Path) -> str:
    """How the user resumes a run; empty for a script that loads its own state."""
    from paceline.config.settings import load
    from paceline.tasks import TASKS

    if not os.path.lexists(run_dir / CONFIG):
        return ""
    with suppress(PacelineError, OSError):
        task = load(run_dir / CONFIG, ours=False).task
        if task is not None and task not in TASKS and ":" not in task:
            return f"start {task} again, with session(..., resume=True)"
    return f"paceline train --resume auto --run-dir {shlex.quote(str(run_dir))}"
