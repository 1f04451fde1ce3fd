"""Refuses a job that can never start, which a queue would keep for ever; inside an allocation, runs it right there."""

import ctypes
import re
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.errors import PacelineError, UsageError, plural, unknown
from paceline.host.procfs import PR_SET_PDEATHSIG
from paceline.launch.slurm.queue import run_slurm, slurm_words
from paceline.protocol.control import STOP_SIGNALS, read_inbox, signal_inbox
from paceline.protocol.job import JobSpec

FORMAT = "%P|%D|%c|%G|%l|%a"
LONGEST_LISTED = 20

POLL_SECONDS = 1.0  # the end of the script wakes us earlier
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
    """Refuse a job that the cluster can never start, as far as its partitions show; the rest sbatch refuses itself.

    Raises:
        UsageError: what was asked, what there is, and what to do.
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
    """Why a job cannot run in a partition, in words; empty if it can."""
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
    """What `sinfo -h -e -o FORMAT` prints; a line that is not understood is left out, and sbatch decides."""
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
        UsageError: what was asked, what is held, and what to do.
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
