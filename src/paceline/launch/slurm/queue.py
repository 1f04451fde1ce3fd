"""Slurm's commands: whether a job fits, submit it, follow it, cancel it; inside an allocation, run it there.

A job that can never start is refused, since the queue would keep it without end.
"""

import ctypes
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.errors import ExitCode, PacelineError, UsageError, plural, unknown
from paceline.host.procfs import PR_SET_PDEATHSIG
from paceline.launch.output import Tail
from paceline.launch.plan import Plan
from paceline.launch.slurm.plan import SCRIPT
from paceline.protocol.control import STOP_SIGNALS, read_inbox, signal_inbox
from paceline.protocol.job import JobSpec

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
        """The exit code of a job that has ended, as a shell would report it."""
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
    """The error of a command of Slurm, without the name of the command."""
    lines = [
        re.sub(r"^(?:\w+: )?(?:error|fatal): |^allocation failure: ", "", line) for line in done.stderr.splitlines()
    ]
    return "; ".join(dict.fromkeys(line.strip() for line in lines if line.strip())) or f"exit code {done.returncode}"


def submit_environment(env: Mapping[str, str], *, partition: bool, minutes: bool) -> dict[str, str]:
    """`env` without the variables that would override the batch script."""
    asked = [name for name, given in (("SBATCH_PARTITION", partition), ("SBATCH_TIMELIMIT", minutes)) if given]
    return {name: value for name, value in env.items() if not OVERRIDES.fullmatch(name) and name not in asked}


def submit(plan: Plan, env: Mapping[str, str]) -> str:
    """Submit the batch script; the job's id. The plan's files must have been written.

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
    """The state of a job; None if Slurm does not know it any more.

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
    """A job from the output of `scontrol show job -o`. The first field is the job's name, which is ours, so no text of
    a user is read as a field."""

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
    """A job that only the accounting knows, if there is one."""
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


# ---- partitions and allocations ----

FORMAT = "%P|%D|%c|%G|%l|%a"
LONGEST_LISTED = 20

INTERACTIVE_STEP = "4294967290"  # the shell that salloc starts on a node, at some sites: not a step of srun


@dataclass(frozen=True)
class Nodes:
    """Nodes of a partition that are alike."""

    partition: str
    count: int
    cpus: int
    gpus: int
    minutes: float  # the partition's time limit; infinity: none
    up: bool
    default: bool


def check_fits(job: JobSpec, env: Mapping[str, str]) -> None:
    """Refuse a job that the cluster can never start, as far as its partitions show; sbatch refuses the others.

    Raises:
        UsageError: the job does not fit; the error has the partitions.
        PacelineError: if Slurm does not answer.
    """
    all_nodes, names = _asked(job, env)
    if not names:
        raise UsageError(code="no-default-partition", partitions=_choices(all_nodes))
    for name in names.split(","):
        if name not in {n.partition for n in all_nodes}:
            raise unknown("partition", name, sorted({n.partition for n in all_nodes}))
    found = [misfit(name, [n for n in all_nodes if n.partition == name], job) for name in names.split(",")]
    if all(found):
        raise UsageError(code="slurm-does-not-fit", found="; ".join(found), partitions=_choices(all_nodes))


def _asked(job: JobSpec, env: Mapping[str, str]) -> tuple[list[Nodes], str]:
    """All nodes, and the partitions that the job is for, separated by commas."""
    done = run_slurm("sinfo", "-h", "-e", "-o", FORMAT)
    if done.returncode != 0:
        raise PacelineError(code="slurm-partitions", reason=slurm_words(done))
    found = parse_sinfo(done.stdout)
    usual = next((n.partition for n in found if n.default), "")
    return found, job.slurm.partition or env.get("SBATCH_PARTITION", "") or usual


def misfit(name: str, nodes: Sequence[Nodes], job: JobSpec) -> str:
    """Why a job cannot run in a partition; empty if it can."""
    asked, cpus = job.slurm, job.nproc * job.slurm.cpus_per_rank
    if not any(n.up for n in nodes):
        return f"partition {name} is down"
    if asked.minutes and asked.minutes > (limit := max(n.minutes for n in nodes)):
        return f"--time {asked.minutes} is more than the {limit:.0f} minutes that partition {name} allows"
    total = sum(n.count for n in nodes)
    if job.nodes > total:
        return f"--nodes {job.nodes} is more than the {plural(total, 'node')} of partition {name}"
    with_gpus = [n for n in nodes if n.gpus >= asked.gpus_per_node]
    if job.nodes > (fit := sum(n.count for n in with_gpus)):
        most = max(n.gpus for n in nodes)
        there = f"{plural(fit, 'node')} with so many (most: {most})"
        return f"--gpus-per-node {asked.gpus_per_node}: partition {name} has {there}"
    if job.nodes > (fit := sum(n.count for n in with_gpus if n.cpus >= cpus)):
        most = max(n.cpus for n in with_gpus)
        return (
            f"--nproc {job.nproc} x --cpus-per-rank {asked.cpus_per_rank} = {cpus} CPUs on each node: partition {name} "
            f"has {plural(fit, 'node')} with so many (most: {most})"
        )
    return ""


def parse_sinfo(text: str) -> list[Nodes]:
    """The output of `sinfo -h -e -o FORMAT`; a line in a different format is ignored, and sbatch decides."""
    found: list[Nodes] = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 6 or not fields[1].isdecimal():
            continue
        name, count, cpus, gres, limit, up = fields
        gpus = sum(int(number) for number in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres))
        found.append(
            Nodes(name.rstrip("*"), int(count), int(cpus.rstrip("+")), gpus, _minutes(limit), up == "up", "*" in name)
        )
    return found


def _minutes(text: str) -> float:
    """Slurm's days-hours:minutes:seconds; without limit: infinity."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return float("inf")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return days * 1440 + hours * 60 + minutes + seconds / 60


def _choices(nodes: Sequence[Nodes]) -> str:
    shown = [
        f"{n.partition} ({plural(n.count, 'node')} with {n.cpus} CPUs, {n.gpus} GPUs, {n.minutes:.0f} minutes)"
        for n in nodes
    ]
    more = f", and {len(shown) - LONGEST_LISTED} more: see sinfo" if len(shown) > LONGEST_LISTED else ""
    return f"This cluster has {', '.join(shown[:LONGEST_LISTED])}{more}"


class Granted(NamedTuple):
    """An allocation that we are in; 0: not known."""

    job_id: str
    nodes: int
    cpus: int  # of each node, of the poorest one
    gpus: int  # of each node
    partition: str


def in_allocation(env: Mapping[str, str]) -> Granted | None:
    """The allocation that this shell or batch script has; None outside, and for a task of srun, which is a worker."""
    job_id = env.get("SLURM_JOB_ID")
    if not job_id or env.get("SLURM_STEP_ID", INTERACTIVE_STEP) != INTERACTIVE_STEP:
        return None
    cpus = [int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", env.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    gpus = re.findall(r"(\d+)(?:\([^)]*\))?(?:,|$)", env.get("SLURM_GPUS_PER_NODE", ""))
    gpus = gpus or [env.get("SLURM_GPUS_ON_NODE", "0")]
    return Granted(
        job_id,
        nodes=_number(env.get("SLURM_JOB_NUM_NODES", "")),
        cpus=min(cpus, default=0),
        gpus=sum(map(_number, gpus)),
        partition=env.get("SLURM_JOB_PARTITION", ""),
    )


def cores_there(held: Granted | None, job: JobSpec, env: Mapping[str, str]) -> int:
    """Cores for each rank of a job with GPUs, at least 1: of the allocation `held`, else of nodes that it may get.

    Raises:
        PacelineError: if Slurm does not answer.
    """
    if held is not None:
        return max(1, held.cpus // job.nproc)
    all_nodes, names = _asked(job, env)
    fit = [n for n in all_nodes if n.partition in names.split(",") and n.gpus >= job.slurm.gpus_per_node]
    cpus = sorted((cpus for n in fit for cpus in [n.cpus] * min(n.count, job.nodes)), reverse=True)
    return max(1, cpus[job.nodes - 1] // job.nproc) if len(cpus) >= job.nodes else 1


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def check_allocation(held: Granted, job: JobSpec) -> None:
    """Refuse a job of another shape than the allocation's.

    Raises:
        UsageError: the job needs a different allocation.
    """
    asked, where = job.slurm, f"this shell is inside the allocation of Slurm job {held.job_id}"
    if held.nodes and job.nodes != held.nodes:
        raise UsageError(code="more-nodes-than-held", value=job.nodes, where=where, nodes=held.nodes)
    if held.cpus and job.nproc * asked.cpus_per_rank > held.cpus:
        raise UsageError(
            code="more-cpus-than-held", nproc=job.nproc, cpus_per_rank=asked.cpus_per_rank,
            needed=job.nproc * asked.cpus_per_rank, where=where, cpus=held.cpus,
        )  # fmt: skip
    if asked.gpus_per_node > held.gpus:
        raise UsageError(code="more-gpus-than-held", value=asked.gpus_per_node, where=where, gpus=held.gpus)
    if asked.partition and held.partition and asked.partition != held.partition:
        raise UsageError(code="other-partition-than-held", value=asked.partition, where=where, partition=held.partition)
    given = [name for name, value in (("--time", asked.minutes), ("--sbatch", asked.options)) if value]
    if given:
        raise UsageError(code="option-within-job", options=" and ".join(given), where=where)


def run_here(script: Path) -> int:
    """Run a batch script inside the allocation, to its end; its exit code. Main thread only.

    Any stop signal lets the run save its state and end; a second one ends it without.
    """
    with signal_inbox((*STOP_SIGNALS, signal.SIGCHLD)) as inbox:
        process = subprocess.Popen(
            ("bash", str(script)),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # or the terminal's Ctrl-C would reach srun as well, which ends without saving
            preexec_fn=_stop_with_parent,
        )
        try:
            while (code := process.poll()) is None:
                select.select([inbox], [], [], POLL_SECONDS)
                for _ in read_inbox(inbox):
                    process.send_signal(signal.SIGUSR2)  # the script passes it on, and does not queue again
        finally:
            process.kill()
            process.wait()
    return 128 - code if code < 0 else code


def _stop_with_parent() -> None:
    """If we are killed, the kernel signals the script to stop the run in good order."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR2, 0, 0, 0)
