"""`paceline cancel RUN`: ends a run, wherever it was started, and says what it has saved."""

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.manager import Checkpoints
from paceline.cli.commands import command_line
from paceline.cli.finding import Means, RunFlags, agent_runs, existing_run, head_roster, home, is_locked, signal_agent
from paceline.cli.run_state import standing
from paceline.errors import ExitCode, TrainingError, UsageError
from paceline.launch.plan import Submission, last_submission
from paceline.launch.slurm import queue
from paceline.protocol.job import STOP_GRACE_SECONDS
from paceline.runs.console import clean
from paceline.runs.folder import CHECKPOINTS, LOCK
from paceline.runs.reading import read
from paceline.runs.summary import LIVE

POLL_SECONDS = 0.5
END_SECONDS = STOP_GRACE_SECONDS + 15.0


@dataclass(frozen=True)
class CancelConfig(RunFlags):
    """Stop a run after it has saved its state. The run does not requeue itself."""

    now: bool = False
    """stop immediately, without a checkpoint"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline cancel ARGUMENTS`."""
    config: CancelConfig = command_line("cancel").parse(arguments)
    run_dir, means = existing_run(config, act=True)
    found = standing(run_dir, means)
    if found.state not in LIVE:
        words = f" ({found.words})" if found.words else ""
        print(clean(f"there is nothing to cancel: the run is {found.state}{words}"), file=sys.stderr)
        return ExitCode.FAILED if found.state == "unknown" else ExitCode.DONE
    ask_to_stop(run_dir, means, now=config.now)
    return _wait(run_dir, means)


def ask_to_stop(run_dir: Path, means: Means, *, now: bool = False) -> None:
    """Have Slurm or the run's agent end it after it has saved its state, or `now`; its end is not waited for.

    Raises:
        UsageError: what is recorded as its job or its agent is something else.
        TrainingError: it cannot be told from here.
    """
    folder, submission = last_submission(home(run_dir))
    slurm_job = submission.slurm_job if submission is not None else ""
    if slurm_job and (job := queue.state(slurm_job)) is not None and job.lives:
        if not queue.writes_to(slurm_job, folder):
            raise UsageError(code="slurm-job-of-another-run", slurm_job=slurm_job, folder=folder)
        queue.cancel(slurm_job, now=now)
    else:
        _stop_agent(run_dir, submission, means, now=now)


def _stop_agent(run_dir: Path, submission: Submission | None, means: Means, *, now: bool) -> None:
    roster = head_roster(run_dir)
    if roster is None or not agent_runs(run_dir, roster, submission, means.ssh):
        try:
            holder = read(run_dir / LOCK, limit_bytes=1000).decode(errors="replace").strip()
        except OSError:
            holder = "nobody"
        who = (
            f"its agent is on {roster.host}, pid {roster.agent_pid}" if roster else f"it has no agent, {holder} has it"
        )
        raise TrainingError(code="cannot-stop-from-here", who=who)
    told = signal_agent(run_dir, roster, submission, means.ssh)
    if now:  # a second signal ends the time to save
        time.sleep(queue.SECOND_SIGNAL_SECONDS)
        told = signal_agent(run_dir, roster, submission, means.ssh)
    if not told:
        raise TrainingError(code="agent-unreachable", host=roster.host)


def _wait(run_dir: Path, means: Means) -> int:
    print("asked to stop; waiting for its end ...", file=sys.stderr, flush=True)
    deadline = time.monotonic() + END_SECONDS
    while (end := standing(run_dir, means)).state in LIVE or is_locked(run_dir):
        if time.monotonic() > deadline:
            print(f"it has not ended after {END_SECONDS:g} s: see paceline status {run_dir}", file=sys.stderr)
            return ExitCode.FAILED
        time.sleep(POLL_SECONDS)
    saved = Checkpoints(run_dir / CHECKPOINTS).entries()
    print(clean(f"ended: {end.state}" + (f" ({end.words})" if end.words else "")))
    if not saved:
        print("it has saved nothing")
    elif end.state != "done":
        again = f"paceline train --resume auto --run-dir {shlex.quote(str(run_dir))}"
        print(f"saved at step {saved[0].step}; to go on: {again}")
    return ExitCode.DONE
