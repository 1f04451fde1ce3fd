"""Slurm's commands: check whether a job fits, submit, follow and cancel it, or run it inside an allocation.

A job that can never start is an error, since it would stay in the queue forever.
"""

import ctypes
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.errors import ExitCode, PacelineError, UsageError, plural, unknown_name_error
from paceline.host.procfs import PR_SET_PDEATHSIG
from paceline.launch.output import LogFollower
from paceline.launch.plan import Plan
from paceline.launch.slurm.plan import SCRIPT_FILE
from paceline.protocol.control import STOP_SIGNALS, read_stop_signals, signal_wakeup
from paceline.protocol.job import JobSpec
from paceline.runs.console import print_to_stderr

ANSWER_SECONDS = 60.0  # a controller with thousands of jobs may take that long
POLL_SECONDS = 1.0
SECOND_SIGNAL_SECONDS = 0.5  # a sooner one would count as the same request
INTERRUPTED = 130  # 128 + SIGINT
ACTIVE_JOB_STATES = (
    "PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "COMPLETING", "STAGE_OUT",
    "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REVOKED",
)  # fmt: skip
STUCK_REASON_PATTERN = re.compile(  # reasons for which a job never starts
    r"DependencyNeverSatisfied|BadConstraints|PartitionNodeLimit|PartitionTimeLimit|AccountNotAllowed|QOSNotAllowed"
    r"|InvalidAccount|InvalidQOS|JobHeld(?:User|Admin)|(?:Assoc|QOS)Max\w*PerJob\w*Limit"
)
OVERRIDE_VARIABLE_PATTERN = re.compile(  # variables that override options in the batch script
    r"SBATCH_(?:ARRAY_INX|CPUS_PER_GPU|ERROR|GPUS|GPUS_PER_NODE|GPUS_PER_TASK|JOB_NAME|NO_REQUEUE|OPEN_MODE|OUTPUT"
    r"|REQUEUE|SIGNAL|WAIT|EXPORT)"
)


class JobState(NamedTuple):
    state: str  # Slurm's name: PENDING, RUNNING, COMPLETED, ...
    reason: str = ""  # why it waits or has ended; empty: none
    nodes: str = ""  # its nodes in Slurm's notation: n[1-2]
    code: int = 0  # exit code of the batch script, 128 + n if signal n ended it
    start_count: int = 1  # number of starts, including the present one

    @property
    def lives(self) -> bool:
        return self.state in ACTIVE_JOB_STATES

    @property
    def exit_code(self) -> int:
        return self.code or (ExitCode.DONE if self.state == "COMPLETED" else ExitCode.FAILED)

    def __str__(self) -> str:
        is_stuck = self.state == "PENDING" and STUCK_REASON_PATTERN.search(self.reason)
        hint = ". It cannot start with these options" if is_stuck else ""
        reason = f" ({self.reason}){hint}" if self.reason else ""
        nodes = f" on {self.nodes}" if self.nodes and self.state != "PENDING" else ""
        turn = f", start {self.start_count}" if self.start_count > 1 else ""
        return f"{self.state}{reason}{nodes}{turn}"


def run_slurm_command(*argv: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
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


def format_slurm_error(done: subprocess.CompletedProcess[str]) -> str:
    prefix = re.compile(r"^(?:\w+: )?(?:error|fatal): |^allocation failure: ")
    lines = [prefix.sub("", line) for line in done.stderr.splitlines()]
    return "; ".join(dict.fromkeys(line.strip() for line in lines if line.strip())) or f"exit code {done.returncode}"


def remove_sbatch_override_variables(env: Mapping[str, str], *, partition: bool, minutes: bool) -> dict[str, str]:
    in_script = [name for name, is_set in (("SBATCH_PARTITION", partition), ("SBATCH_TIMELIMIT", minutes)) if is_set]
    overriding = {name for name in env if OVERRIDE_VARIABLE_PATTERN.fullmatch(name) or name in in_script}
    return {name: value for name, value in env.items() if name not in overriding}


def submit(plan: Plan, env: Mapping[str, str]) -> str:
    """Submit the batch script; return the job id. The files of the plan must have been written."""
    assert plan.submit_command is not None
    script = plan.files[SCRIPT_FILE]
    env = remove_sbatch_override_variables(
        env, partition="#SBATCH --partition=" in script, minutes="#SBATCH --time=" in script
    )
    result = run_slurm_command(plan.submit_command.argv[0], "--test-only", *plan.submit_command.argv[2:], env=env)
    if result.returncode == 0:
        result = run_slurm_command(*plan.submit_command.argv, env=env)
    if result.returncode != 0:
        raise UsageError(code="job-refused", reason=format_slurm_error(result))
    return result.stdout.strip().split(";")[0]  # ID;CLUSTER


def query_job_state(job_id: str) -> JobState | None:
    done = run_slurm_command("scontrol", "show", "job", "-o", job_id)
    if done.returncode == 0:
        return parse_job(done.stdout)
    if "Invalid job id" not in done.stderr:
        raise PacelineError(code="slurm-query", job=job_id, reason=format_slurm_error(done))
    return _from_accounting(job_id)


def job_writes_to(job_id: str, folder: Path) -> bool:
    """Whether the output of this job goes into `folder`. If not, the job belongs to a different run."""
    job_info = run_slurm_command("scontrol", "show", "job", "-o", job_id).stdout
    return any(f" StdOut={path}/" in job_info for path in (str(folder), str(folder).replace("%", "%%")))


def parse_job(text: str) -> JobState:
    """Parse `scontrol show job -o`. It begins with the job's name, which paceline sets: a user's text is no field."""

    def value(name: str) -> str:
        match = re.search(rf"(?:^| ){name}=(\S*)", text)
        return "" if match is None or match[1] in ("None", "(null)") else match[1]

    return JobState(
        state=value("JobState") or "UNKNOWN", reason=value("Reason"), nodes=value("NodeList"),
        code=_code(value("ExitCode")), start_count=int(value("Restarts") or 0) + 1,
    )  # fmt: skip


def _code(text: str) -> int:
    """The exit code from Slurm's `7:0` or `0:15`: code and signal."""
    code, _, number = text.partition(":")
    return int(code or 0) or (128 + int(number) if number not in ("", "0") else 0)


def _from_accounting(job_id: str) -> JobState | None:
    try:
        done = run_slurm_command("sacct", "-n", "-P", "-X", "-j", job_id, "-o", "State,ExitCode,NodeList")
    except PacelineError:
        return None
    fields = done.stdout.splitlines()[-1].split("|") if done.returncode == 0 and done.stdout.strip() else []
    if len(fields) != 3:
        return None
    return JobState(fields[0].split()[0], nodes=fields[2], code=_code(fields[1]))  # the state can be: CANCELLED by 1000


def cancel(job_id: str, *, now: bool = False) -> None:
    """End a job: SIGTERM to all its processes, so that it saves, and SIGKILL after Slurm's KillWait.

    With `now` the job does not save: the agents get a second signal first, which ends them immediately. Slurm has no
    command for this, since it sends SIGTERM for `scancel --signal=KILL` as well.
    """
    job = query_job_state(job_id) if now else None
    for _ in range(2 if job is not None and job.state == "RUNNING" else 0):  # scancel --signal waits for pending jobs
        run_slurm_command("scancel", "--signal=TERM", job_id)
        time.sleep(SECOND_SIGNAL_SECONDS)
    done = run_slurm_command("scancel", job_id)
    if done.returncode != 0:
        raise PacelineError(code="slurm-cancel", job=job_id, reason=format_slurm_error(done))


def follow_job(job_id: str, output: Path, *, cancel_on_interrupt: bool) -> int:
    """Show the states and the output of a job until its end, or Ctrl-C. Return its exit code, or 130 if it continues.

    With `cancel_on_interrupt`, Ctrl-C cancels the job, and a second Ctrl-C stops following.
    """
    tail = LogFollower(output)
    try:
        return _watch(job_id, tail)
    except KeyboardInterrupt:
        if not cancel_on_interrupt:
            print_to_stderr(f"job {job_id} continues. To end it: scancel {job_id}")
            return INTERRUPTED
    print_to_stderr(f"cancelling job {job_id}: it saves its state and ends")
    cancel(job_id)
    return _watch(job_id, tail)


def _watch(job_id: str, tail: LogFollower) -> int:
    last = ""
    while True:
        job_state, has_ended = None, False
        try:
            job_state = query_job_state(job_id)
            line = f"job {job_id}: {job_state or 'Slurm has no record of it any more'}"
            has_ended = job_state is None or not job_state.lives
        except UsageError:
            raise
        except PacelineError as error:  # for example, Slurm's controller is being restarted: the job continues
            line = f"{error}; trying again"
        if line != last:
            print_to_stderr(line)
            last = line
        print(tail.read(to_the_end=has_ended), end="", flush=True)
        if has_ended:
            return job_state.exit_code if job_state is not None else ExitCode.FAILED
        time.sleep(POLL_SECONDS)


# ---- partitions and allocations ----

SINFO_FORMAT = "%P|%D|%c|%G|%l|%a"
MAX_LISTED_NODE_SETS = 20

INTERACTIVE_STEP = "4294967290"  # the shell that salloc starts on a node at some sites; it is not a step of srun


@dataclass(frozen=True)
class NodeSet:
    partition: str
    count: int
    cpus: int
    gpus: int
    time_limit_minutes: float  # the partition's time limit; infinity: none
    up: bool
    default: bool


def check_job_fits_partitions(job: JobSpec, env: Mapping[str, str]) -> None:
    all_nodes, names = _partitions(job, env)
    if not names:
        raise UsageError(code="no-default-partition", partitions=_choices(all_nodes))
    for name in names.split(","):
        if name not in {n.partition for n in all_nodes}:
            raise unknown_name_error("partition", name, sorted({n.partition for n in all_nodes}))
    nodes_of = {name: [node for node in all_nodes if node.partition == name] for name in names.split(",")}
    reasons = [allocation_problem(name, nodes, job) for name, nodes in nodes_of.items()]
    if all(reasons):
        raise UsageError(code="slurm-does-not-fit", found="; ".join(reasons), partitions=_choices(all_nodes))


def _partitions(job: JobSpec, env: Mapping[str, str]) -> tuple[list[NodeSet], str]:
    done = run_slurm_command("sinfo", "-h", "-e", "-o", SINFO_FORMAT)
    if done.returncode != 0:
        raise PacelineError(code="slurm-partitions", reason=format_slurm_error(done))
    nodes = parse_sinfo(done.stdout)
    default = next((n.partition for n in nodes if n.default), "")
    return nodes, job.slurm.partition or env.get("SBATCH_PARTITION", "") or default


def allocation_problem(name: str, nodes: Sequence[NodeSet], job: JobSpec) -> str:
    alloc, cpus = job.slurm, job.nproc * job.slurm.cpus_per_rank
    if not any(n.up for n in nodes):
        return f"partition {name} is down"
    if alloc.minutes and alloc.minutes > (limit := max(n.time_limit_minutes for n in nodes)):
        return f"--time {alloc.minutes} is more than the {limit:.0f} minutes that partition {name} allows"
    total = sum(n.count for n in nodes)
    if job.nodes > total:
        return f"--nodes {job.nodes} is more than the {plural(total, 'node')} of partition {name}"
    with_gpus = [n for n in nodes if n.gpus >= alloc.gpus_per_node]
    if job.nodes > (fit_count := sum(n.count for n in with_gpus)):
        largest = max(n.gpus for n in nodes)
        available = f"{plural(fit_count, 'node')} with at least {alloc.gpus_per_node} GPUs (most: {largest})"
        return f"--gpus-per-node {alloc.gpus_per_node}: partition {name} has {available}"
    if job.nodes > (fit_count := sum(n.count for n in with_gpus if n.cpus >= cpus)):
        largest = max(n.cpus for n in with_gpus)
        return (
            f"--nproc {job.nproc} x --cpus-per-rank {alloc.cpus_per_rank} = {cpus} CPUs on each node: partition {name} "
            f"has {plural(fit_count, 'node')} with at least {cpus} CPUs (most: {largest})"
        )
    return ""


def parse_sinfo(text: str) -> list[NodeSet]:
    """Parse the output of `sinfo -h -e -o FORMAT`. Ignores lines in a different format: sbatch checks again."""
    nodes: list[NodeSet] = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 6 or not fields[1].isdecimal():
            continue
        name, count, cpus, gres, limit, up = fields
        gpus = sum(int(number) for number in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres))
        nodes.append(
            NodeSet(name.rstrip("*"), int(count), int(cpus.rstrip("+")), gpus, _minutes(limit), up == "up", "*" in name)
        )
    return nodes


def _minutes(text: str) -> float:
    """Minutes from Slurm's days-hours:minutes:seconds; infinity without a limit."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return float("inf")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return days * 1440 + hours * 60 + minutes + seconds / 60


def _choices(nodes: Sequence[NodeSet]) -> str:
    choices = [
        f"{n.partition} ({plural(n.count, 'node')} with {n.cpus} CPUs, {n.gpus} GPUs, "
        f"{n.time_limit_minutes:.0f} minutes)"
        for n in nodes
    ]
    left_out = len(choices) - MAX_LISTED_NODE_SETS
    remainder = f", and {left_out} more: see sinfo" if left_out > 0 else ""
    return f"This cluster has {', '.join(choices[:MAX_LISTED_NODE_SETS])}{remainder}"


class CurrentAllocation(NamedTuple):
    """The Slurm allocation of this process. A number is 0 if it is unknown."""

    job_id: str
    nodes: int
    cpus: int  # the minimum over the nodes
    gpus: int  # of each node
    partition: str


def current_allocation(env: Mapping[str, str]) -> CurrentAllocation | None:
    """The allocation of this shell or batch script; None outside of one, and for a task of srun, which is a worker."""
    job_id = env.get("SLURM_JOB_ID")
    if not job_id or env.get("SLURM_STEP_ID", INTERACTIVE_STEP) != INTERACTIVE_STEP:
        return None
    cpus = [int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", env.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    gpus = re.findall(r"(\d+)(?:\([^)]*\))?(?:,|$)", env.get("SLURM_GPUS_PER_NODE", ""))
    gpus = gpus or [env.get("SLURM_GPUS_ON_NODE", "0")]
    return CurrentAllocation(
        job_id,
        nodes=_number(env.get("SLURM_JOB_NUM_NODES", "")),
        cpus=min(cpus, default=0),
        gpus=sum(map(_number, gpus)),
        partition=env.get("SLURM_JOB_PARTITION", ""),
    )


def cores_per_rank(allocation: CurrentAllocation | None, job: JobSpec, env: Mapping[str, str]) -> int:
    """Cores for each rank of a job with GPUs, at least 1: on the `allocation`, otherwise on its possible nodes."""
    if allocation is not None:
        return max(1, allocation.cpus // job.nproc)
    all_nodes, names = _partitions(job, env)
    fitting = [n for n in all_nodes if n.partition in names.split(",") and n.gpus >= job.slurm.gpus_per_node]
    cpus = sorted((cpus for n in fitting for cpus in [n.cpus] * min(n.count, job.nodes)), reverse=True)
    return max(1, cpus[job.nodes - 1] // job.nproc) if len(cpus) >= job.nodes else 1


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def check_job_fits_allocation(allocation: CurrentAllocation, job: JobSpec) -> None:
    alloc, where = job.slurm, f"this shell is inside the allocation of Slurm job {allocation.job_id}"
    if allocation.nodes and job.nodes != allocation.nodes:
        raise UsageError(code="more-nodes-than-held", value=job.nodes, where=where, nodes=allocation.nodes)
    if allocation.cpus and job.nproc * alloc.cpus_per_rank > allocation.cpus:
        raise UsageError(
            code="more-cpus-than-held", nproc=job.nproc, cpus_per_rank=alloc.cpus_per_rank,
            needed=job.nproc * alloc.cpus_per_rank, where=where, cpus=allocation.cpus,
        )  # fmt: skip
    if alloc.gpus_per_node > allocation.gpus:
        raise UsageError(code="more-gpus-than-held", value=alloc.gpus_per_node, where=where, gpus=allocation.gpus)
    if alloc.partition and allocation.partition and alloc.partition != allocation.partition:
        raise UsageError(
            code="other-partition-than-held", value=alloc.partition, where=where, partition=allocation.partition
        )
    options = [name for name, value in (("--time", alloc.minutes), ("--sbatch", alloc.options)) if value]
    if options:
        raise UsageError(code="option-within-job", options=" and ".join(options), where=where)


def run_in_allocation(script: Path) -> int:
    """Run a batch script inside the allocation to its end; return its exit code. Main thread only.

    A stop signal makes the run save its state and end. A second one ends the run without saving.
    """
    with signal_wakeup((*STOP_SIGNALS, signal.SIGCHLD)) as wakeup:
        process = subprocess.Popen(
            ("bash", str(script)),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # otherwise Ctrl-C in the terminal would end srun, and the run could not save
            preexec_fn=_stop_with_parent,
        )
        try:
            while (code := process.poll()) is None:
                select.select([wakeup], [], [], POLL_SECONDS)
                for _ in read_stop_signals(wakeup):
                    process.send_signal(signal.SIGUSR2)  # the script forwards it, and does not requeue the job
        finally:
            process.kill()
            process.wait()
    return 128 - code if code < 0 else code


def _stop_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR2, 0, 0, 0)
