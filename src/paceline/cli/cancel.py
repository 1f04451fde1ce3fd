"""`paceline cancel` stops a run after it has saved its state; `paceline join` adds this host to a running job."""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.manager import Checkpoints
from paceline.cli import command_line, run_state
from paceline.cli.options import check_positive
from paceline.errors import ExitCode, TrainingError, UsageError
from paceline.launch.plan import SubmitRecord, last_submission
from paceline.launch.slurm import queue
from paceline.protocol.job import GRACE_PERIOD_SECONDS, NodePlan
from paceline.runs.console import remove_controls
from paceline.runs.folder import CHECKPOINTS, JOIN_FILE, LOCK
from paceline.runs.owners import UnreadableFileError
from paceline.runs.reading import decode, read
from paceline.runs.summary import LIVE_STATES

POLL_SECONDS = 0.5
END_TIMEOUT_SECONDS = GRACE_PERIOD_SECONDS + 15.0
MAX_INVITATION_BYTES = 1 << 20  # of an invitation


@dataclass(frozen=True)
class CancelConfig(run_state.RunFlags):
    """Stop a run after it has saved its state. The run does not requeue itself."""

    now: bool = False
    """stop immediately, without a checkpoint"""


@dataclass(frozen=True)
class JoinConfig(run_state.RunFlags):
    """Add this host to a running job that was started with --nodes MIN:MAX and has fewer than MAX nodes.

    Run the command on the new host, in a folder from which RUN is the same folder as on the other hosts. The run
    saves its state after the current step and continues with one more host. Ctrl-C removes the host again after a
    step.
    """

    nproc: int | None = None
    """worker processes on this host (default: the --nproc of the run)"""


def main(arguments: Sequence[str]) -> int:
    config: CancelConfig = command_line("cancel").parse(arguments)
    run_dir, access = run_state.resolve_run_access(config, act=True)
    state, details, *_ = run_state.read_run_status(run_dir, access)
    if state not in LIVE_STATES:
        details = f" ({details})" if details else ""
        print(remove_controls(f"there is nothing to cancel: the run is {state}{details}"), file=sys.stderr)
        return ExitCode.FAILED if state == "unknown" else ExitCode.DONE
    ask_to_stop(run_dir, access, now=config.now)
    return _wait(run_dir, access)


def ask_to_stop(run_dir: Path, access: run_state.Access, *, now: bool = False) -> None:
    """Ask Slurm or the agent to end the run after it has saved, or `now` without saving. Do not wait for the end."""
    folder, submission = last_submission(run_state.agent_run_folder(run_dir))
    slurm_job = submission.slurm_job if submission is not None else ""
    if slurm_job and (job := queue.query_job_state(slurm_job)) is not None and job.lives:
        if not queue.writes_to(slurm_job, folder):
            raise UsageError(code="slurm-job-of-another-run", slurm_job=slurm_job, folder=folder)
        queue.cancel(slurm_job, now=now)
    else:
        _stop_agent(run_dir, submission, access, now=now)


def _stop_agent(run_dir: Path, submission: SubmitRecord | None, access: run_state.Access, *, now: bool) -> None:
    roster = run_state.coordinator_roster(run_dir)
    if roster is None or not run_state.is_agent_alive(run_dir, roster, submission, access.ssh):
        try:
            holder = read(run_dir / LOCK, limit_bytes=1000).decode(errors="replace").strip()
        except OSError:
            holder = "no process"
        agent = f"its agent is on {roster.host}, pid {roster.agent_pid}" if roster else ""
        raise TrainingError(code="cannot-stop-from-here", who=agent or f"it has no agent, and {holder} holds its lock")
    is_sent = run_state.signal_agent(run_dir, roster, submission, access.ssh)
    if now:  # a second signal makes the agent kill the workers immediately
        time.sleep(queue.SECOND_SIGNAL_SECONDS)
        is_sent = run_state.signal_agent(run_dir, roster, submission, access.ssh)
    if not is_sent:
        raise TrainingError(code="agent-unreachable", host=roster.host)


def _wait(run_dir: Path, access: run_state.Access) -> int:
    print("stop requested; waiting for the run to end ...", file=sys.stderr, flush=True)
    deadline = time.monotonic() + END_TIMEOUT_SECONDS
    while (end := run_state.read_run_status(run_dir, access)).state in LIVE_STATES or run_state.is_locked(run_dir):
        if time.monotonic() > deadline:
            print(
                f"the run has not ended after {END_TIMEOUT_SECONDS:g} s: see paceline status {run_dir}", file=sys.stderr
            )
            return ExitCode.FAILED
        time.sleep(POLL_SECONDS)
    saved = Checkpoints(run_dir / CHECKPOINTS).entries()
    print(remove_controls(f"ended: {end.state}" + (f" ({end.details})" if end.details else "")))
    if not saved:
        print("no checkpoint was saved")
    elif end.state != "done":
        again = run_state.resume_command(run_dir)
        print(f"saved at step {saved[0].step}" + (f"; to resume: {again}" if again else ""))
    return ExitCode.DONE


def join(arguments: Sequence[str]) -> int:
    config: JoinConfig = command_line("join").parse(arguments)
    check_positive(config, "nproc")
    # its plan is executed here: no other user may have written it
    run_dir, access = run_state.resolve_run_access(config, act=True)
    run = shlex.quote(str(run_dir))
    file = next((attempt / JOIN_FILE for attempt in reversed(run_state.attempts(run_dir))), run_dir / JOIN_FILE)
    try:
        decode(file, NodePlan, limit_bytes=MAX_INVITATION_BYTES, ours=True)
    except FileNotFoundError:
        state = run_state.read_run_status(run_dir, access).state
        if state in LIVE_STATES:
            why = "was not started with --nodes MIN:MAX, or is still starting"
        else:
            why = f"is {state}. Start it again with this host: paceline train --resume auto --run-dir {run} --hosts ..."
        raise UsageError(code="run-takes-no-hosts", run=run, why=why) from None
    except UnreadableFileError as error:
        raise UsageError(code="invitation-unreadable", reason=str(error)) from None
    options = ["--plan", str(file), "--join", *(("--nproc", str(config.nproc)) if config.nproc else ())]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "paceline.launch.agent", *options])
