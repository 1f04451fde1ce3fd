"""Jobs submitted, watched and cancelled by Slurm's own commands, and its words translated."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.errors import ExitCode, PacelineError, UsageError
from paceline.launch.plan import Plan
from paceline.launch.slurm.plan import SCRIPT
from paceline.launch.tail import Tail

ANSWER_SECONDS = 60.0  # a controller with thousands of jobs may take that long
POLL_SECONDS = 1.0
SECOND_SIGNAL_SECONDS = 0.5  # a sooner one would count as the same request
INTERRUPTED = 130  # 128 + SIGINT
LIVING = (
    "PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "COMPLETING", "STAGE_OUT",
    "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REVOKED",
)  # fmt: skip
STUCK = re.compile(  # reasons that no waiting ends
    r"DependencyNeverSatisfied|BadConstraints|PartitionNodeLimit|PartitionTimeLimit|AccountNotAllowed|QOSNotAllowed"
    r"|InvalidAccount|InvalidQOS|JobHeld(?:User|Admin)|(?:Assoc|QOS)Max\w*PerJob\w*Limit"
)
OVERRIDES = re.compile(  # variables by which sbatch would silently change what the script says
    r"SBATCH_(?:ARRAY_INX|CPUS_PER_GPU|ERROR|GPUS|GPUS_PER_NODE|GPUS_PER_TASK|JOB_NAME|NO_REQUEUE|OPEN_MODE|OUTPUT"
    r"|REQUEUE|SIGNAL|WAIT|EXPORT)"
)


class JobState(NamedTuple):
    """A job as Slurm sees it."""

    state: str  # Slurm's word: PENDING, RUNNING, COMPLETED, ...
    reason: str = ""  # why it waits, or what ended it; empty: none
    nodes: str = ""  # where it runs or ran, as Slurm writes it: n[1-2]
    code: int = 0  # the batch script's exit code, 128 + n if signal n ended it
    turn: int = 1  # how often it was started, this time included

    @property
    def lives(self) -> bool:
        """Whether it waits or runs."""
        return self.state in LIVING

    @property
    def exit_code(self) -> int:
        """What a shell would see of a job that has ended."""
        return self.code or (ExitCode.DONE if self.state == "COMPLETED" else ExitCode.FAILED)

    def __str__(self) -> str:
        stuck = ". It will not start as it is" if self.state == "PENDING" and STUCK.search(self.reason) else ""
        reason = f" ({self.reason}){stuck}" if self.reason else ""
        nodes = f" on {self.nodes}" if self.nodes and self.state != "PENDING" else ""
        turn = f", start {self.turn}" if self.turn > 1 else ""
        return f"{self.state}{reason}{nodes}{turn}"


def run_slurm(*argv: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands."""
    environment = {**(os.environ if env is None else env), "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    try:
        return subprocess.run(
            argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=ANSWER_SECONDS, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise UsageError(code="no-slurm", value=argv[0]) from None
    except subprocess.TimeoutExpired:
        raise PacelineError(code="slurm-silent", command=argv[0], seconds=ANSWER_SECONDS) from None


def slurm_words(done: subprocess.CompletedProcess[str]) -> str:
    """What a command of Slurm said, without its own names for itself."""
    lines = [
        re.sub(r"^(?:\w+: )?(?:error|fatal): |^allocation failure: ", "", line) for line in done.stderr.splitlines()
    ]
    return "; ".join(dict.fromkeys(line.strip() for line in lines if line.strip())) or f"exit code {done.returncode}"


def submit_environment(env: Mapping[str, str], *, partition: bool, minutes: bool) -> dict[str, str]:
    """`env` without the variables that win over what the batch script says."""
    asked = [name for name, given in (("SBATCH_PARTITION", partition), ("SBATCH_TIMELIMIT", minutes)) if given]
    return {name: value for name, value in env.items() if not OVERRIDES.fullmatch(name) and name not in asked}


def submit(plan: Plan, env: Mapping[str, str]) -> str:
    """Hand the batch script to Slurm; the job's id. The plan's files must have been written.

    Raises:
        UsageError: if Slurm refuses it.
    """
    assert plan.submit is not None
    script = plan.files[SCRIPT]
    env = submit_environment(env, partition="#SBATCH --partition=" in script, minutes="#SBATCH --time=" in script)
    tried = run_slurm(plan.submit.argv[0], "--test-only", *plan.submit.argv[2:], env=env)
    if tried.returncode == 0:
        tried = run_slurm(*plan.submit.argv, env=env)
    if tried.returncode != 0:
        raise UsageError(code="job-refused", reason=slurm_words(tried))
    return tried.stdout.strip().split(";")[0]  # ID;CLUSTER


def state(job_id: str) -> JobState | None:
    """How a job is; None when Slurm does not know it any more.

    Raises:
        UsageError: if there is no Slurm here.
        PacelineError: if Slurm does not answer.
    """
    done = run_slurm("scontrol", "show", "job", "-o", job_id)
    if done.returncode == 0:
        return parse_job(done.stdout)
    if "Invalid job id" not in done.stderr:
        raise PacelineError(code="slurm-query", job=job_id, reason=slurm_words(done))
    return _remembered(job_id)


def writes_to(job_id: str, folder: Path) -> bool:
    """Whether the output of this job goes into `folder`, which distinguishes it from a job of another run.

    Raises:
        PacelineError: if Slurm does not answer.
    """
    shown = run_slurm("scontrol", "show", "job", "-o", job_id).stdout
    return any(f" StdOut={path}/" in shown for path in (str(folder), str(folder).replace("%", "%%")))


def parse_job(text: str) -> JobState:
    """A job from what `scontrol show job -o` prints: the first field is the job's name, which is ours, so nobody's text
    is taken for a field."""

    def value(name: str) -> str:
        match = re.search(rf"(?:^| ){name}=(\S*)", text)
        return "" if match is None or match[1] in ("None", "(null)") else match[1]

    return JobState(
        state=value("JobState") or "UNKNOWN", reason=value("Reason"), nodes=value("NodeList"),
        code=_code(value("ExitCode")), turn=int(value("Restarts") or 0) + 1,
    )  # fmt: skip


def _code(text: str) -> int:
    """The exit code from Slurm's `7:0` or `0:15`: code and signal."""
    code, _, number = text.partition(":")
    return int(code or 0) or (128 + int(number) if number not in ("", "0") else 0)


def _remembered(job_id: str) -> JobState | None:
    """A job that only the accounting, where there is one, knows."""
    try:
        done = run_slurm("sacct", "-n", "-P", "-X", "-j", job_id, "-o", "State,ExitCode,NodeList")
    except PacelineError:
        return None
    fields = done.stdout.splitlines()[-1].split("|") if done.returncode == 0 and done.stdout.strip() else []
    if len(fields) != 3:
        return None
    return JobState(fields[0].split()[0], nodes=fields[2], code=_code(fields[1]))  # CANCELLED by 1000


def cancel(job_id: str, *, now: bool = False) -> None:
    """End a job: with SIGTERM to all of it, so that it saves, and with SIGKILL after Slurm's KillWait.

    With `now` it does not save: a second signal means that to our agents. Slurm itself has no other way, because it
    makes `scancel --signal=KILL` a SIGTERM as well.

    Raises:
        PacelineError: if Slurm refuses.
    """
    job = state(job_id) if now else None
    for _ in range(2 if job is not None and job.state == "RUNNING" else 0):  # what waits, scancel would wait for
        run_slurm("scancel", "--signal=TERM", job_id)
        time.sleep(SECOND_SIGNAL_SECONDS)
    done = run_slurm("scancel", job_id)
    if done.returncode != 0:
        raise PacelineError(code="slurm-cancel", job=job_id, reason=slurm_words(done))


def follow(
    job_id: str, output: Path, say: Callable[[str], None], show: Callable[[str], None], *, cancel_on_interrupt: bool
) -> int:
    """Show a job's states and output until its end, or Ctrl-C; the job's exit code, or 130 when it runs on.

    Args:
        job_id: of a job that was submitted.
        output: the file that its output goes to.
        say: given every change of state.
        show: given the output as it comes, whole lines.
        cancel_on_interrupt: whether Ctrl-C cancels the job; a second one then only stops following.
    """
    tail = Tail(output)
    try:
        return _watch(job_id, tail, say, show)
    except KeyboardInterrupt:
        if not cancel_on_interrupt:
            say(f"job {job_id} goes on. To end it: scancel {job_id}")
            return INTERRUPTED
    say(f"cancelling job {job_id}: it saves its state and ends")
    cancel(job_id)
    return _watch(job_id, tail, say, show)


def _watch(job_id: str, tail: Tail, say: Callable[[str], None], show: Callable[[str], None]) -> int:
    last = ""
    while True:
        now, ended = None, False
        try:
            now = state(job_id)
            line = f"job {job_id}: {now or 'Slurm does not know it any more'}"
            ended = now is None or not now.lives
        except UsageError:
            raise
        except PacelineError as error:  # its controller is being restarted, say: the job runs on
            line = f"{error}; trying again"
        if line != last:
            say(line)
            last = line
        if text := tail.read(to_the_end=ended):
            show(text)
        if ended:
            return now.exit_code if now is not None else ExitCode.FAILED
        time.sleep(POLL_SECONDS)
