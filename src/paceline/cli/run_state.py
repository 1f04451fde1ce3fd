"""How a run goes on or has ended, from what it has written, who holds its folder, and what Slurm says."""

import os
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from paceline import config as configuration
from paceline.checkpoint.manager import Checkpoints
from paceline.cli.finding import NOTHING, Means, agent_runs, attempts, head_roster, home, is_locked
from paceline.contract.failure import GOOD_ENDS
from paceline.errors import ExitCode, PacelineError, UsageError, first_few
from paceline.launch.slurm import queue
from paceline.launch.submission import Submission, last_submission
from paceline.observe.events import Counted, Evaluated, Started, Step, last_events, read_events
from paceline.observe.folder import CHECKPOINTS, CONFIG, failure_records
from paceline.observe.nodes import read_nodes
from paceline.observe.notices import notices
from paceline.observe.summary import LIVE, RunState, State, Summary, read_ended, read_summary
from paceline.observe.utilization import goodput, speed
from paceline.view.live import rates

WINDOW_STEPS = 50
FIRST_EVENTS = 100  # which hold the first step, and what is written down after it
EVENTS = "events-0.jsonl"
MOST_SCORES, MOST_CHARS = 20, 2000  # that are shown: texts in a folder may have any length


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


def run_state(run_dir: Path, means: Means = NOTHING) -> RunState:
    """The state of a run, now.

    Raises:
        PacelineError: if a part of it cannot be read.
    """
    found = standing(run_dir, means)
    submission = found.submission
    saved = Checkpoints(run_dir / CHECKPOINTS).entries()
    summary = None if found.state in LIVE else read_summary(run_dir)  # that of a start before this one
    told = summary is not None and summary.steps is not None  # events then have nothing to add
    progress = _Progress() if told else _progress(run_dir)
    starts = attempts(run_dir)
    last_sign = next(p for p in (run_dir / EVENTS, *starts[-1:], run_dir) if os.path.lexists(p))
    return RunState(
        run_dir=str(run_dir),
        state=found.state,
        words=found.words[:MOST_CHARS],
        on=submission.on if submission is not None else "local",
        hosts=_hosts(submission, found.job, run_dir),
        nodes=_nodes(starts) if found.state in LIVE else "",
        slurm_job=submission.slurm_job if submission is not None else "",
        attempts=len(starts),
        **_speed(run_dir, progress, running=found.state == "running", summary=summary or Summary("", 0)),
        checkpoint_step=saved[0].step if saved else None,
        found=tuple(one.words for one in islice(notices(starts[-1]), MOST_SCORES)) if starts else (),
        unix_time=last_sign.lstat().st_mtime,
        **_reached(summary or Summary("", 0), _settings(run_dir) or configuration.TrainConfig(), progress),
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


def _reached(summary: Summary, settings: configuration.TrainConfig, progress: _Progress) -> dict[str, Any]:
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


def _slurm_job(submission: Submission | None, means: Means) -> tuple[queue.JobState | None, str]:
    """What Slurm says of a run's job, or why it says nothing."""
    if submission is None or not submission.slurm_job:
        return None, ""
    if not means.slurm:
        return None, f"Slurm is not asked about job {submission.slurm_job}"
    try:
        return queue.state(submission.slurm_job), ""
    except PacelineError as error:
        return None, str(error)


def standing(run_dir: Path, means: Means = NOTHING) -> Standing:
    """Only whether a run runs or how it has ended: cheaper than `run_state`, for a command that waits.

    Raises:
        PacelineError: if a part of it cannot be read.
    """
    _, submission = last_submission(home(run_dir))
    job, unheard = _slurm_job(submission, means)
    state, words = _judged(run_dir, submission, job, unheard, means)
    return Standing(state, words, submission, job)


def _judged(
    run_dir: Path, submission: Submission | None, job: queue.JobState | None, unheard: str, means: Means
) -> tuple[State, str]:
    if job is not None and job.lives:
        return ("queued" if job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD") else "running"), str(job)
    if is_locked(run_dir):
        return "running", ""
    roster = head_roster(run_dir)
    alive = agent_runs(run_dir, roster, submission, means.ssh) if roster is not None else False
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
        return "unknown", f"{roster.host}, where its agent is, {_unasked(submission, means)}"
    if roster is not None or newest:
        return "lost", "it ended without a word: killed, or its machine was switched off"
    return "not started", ""


def _of_code(code: int, words: str) -> tuple[State, str]:
    if code in (ExitCode.DONE, ExitCode.SAVED):
        return ("done", "") if code == ExitCode.DONE else ("saved", "stopped in good order, ready to be resumed")
    return "failed", f"exit code {code}" + (f": {words}" if words else "")


def _unasked(submission: Submission | None, means: Means) -> str:
    if not means.ssh:
        return "is not asked"
    words = "cannot be reached from here"
    if submission is not None and submission.ssh not in ((), means.ssh):
        words += f". It was started with --ssh {shlex.join(submission.ssh)!r}: type that again, no file's words are run"
    return words


def _hosts(submission: Submission | None, job: queue.JobState | None, run_dir: Path) -> tuple[str, ...]:
    if job is not None and job.nodes:
        return (job.nodes,)
    if submission is not None and submission.hosts:
        return submission.hosts
    roster = head_roster(run_dir)
    return (roster.host,) if roster is not None else ()


def _nodes(starts: Sequence[Path]) -> str:
    found = read_nodes(starts[-1]) if starts else None
    return found.line[:MOST_CHARS] if found is not None else ""


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


def _settings(run_dir: Path) -> configuration.TrainConfig | None:
    try:
        return configuration.load(run_dir / CONFIG, ours=False)
    except UsageError:  # not there yet, or another version's
        return None
