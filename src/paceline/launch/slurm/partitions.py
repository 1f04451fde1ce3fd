"""Refuses, before it is submitted, a job that can never start on this cluster: a queue would keep it for ever."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError, UsageError, unknown
from paceline.launch.job import Job
from paceline.launch.slurm.queue import run_slurm, slurm_words

FORMAT = "%P|%D|%c|%G|%l|%a"
LONGEST_LISTED = 20


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


def check_fits(job: Job, env: Mapping[str, str]) -> None:
    """Refuse a job that the cluster can never start, as far as its partitions show; the rest sbatch refuses itself.

    Raises:
        UsageError: what was asked, what there is, and what to do.
        PacelineError: if Slurm does not answer.
    """
    done = run_slurm("sinfo", "-h", "-e", "-o", FORMAT)
    if done.returncode != 0:
        raise PacelineError(f"Slurm does not say which partitions there are: {slurm_words(done)}")
    all_nodes = parse_sinfo(done.stdout)
    names = (
        job.slurm.partition
        or env.get("SBATCH_PARTITION", "")
        or next((n.partition for n in all_nodes if n.default), "")
    )
    if not names:
        raise UsageError(f"this cluster has no default partition: {_choices(all_nodes)}")
    for name in names.split(","):
        if name not in {n.partition for n in all_nodes}:
            raise unknown("partition", name, sorted({n.partition for n in all_nodes}))
    found = [misfit(name, [n for n in all_nodes if n.partition == name], job) for name in names.split(",")]
    if all(found):
        raise UsageError(f"{'; '.join(found)}. {_choices(all_nodes)}")


def misfit(name: str, nodes: Sequence[Nodes], job: Job) -> str:
    """Why a job cannot run in a partition, in words; empty if it can."""
    asked, cpus = job.slurm, job.nproc * job.slurm.cpus_per_rank
    if not any(n.up for n in nodes):
        return f"partition {name} is down"
    if asked.minutes and asked.minutes > (limit := max(n.minutes for n in nodes)):
        return f"--time {asked.minutes} is more than the {limit:.0f} minutes that partition {name} allows"
    total = sum(n.count for n in nodes)
    if job.nodes > total:
        return f"--nodes {job.nodes} is more than the {_nodes(total)} of partition {name}"
    with_gpus = [n for n in nodes if n.gpus >= asked.gpus_per_node]
    if job.nodes > (fit := sum(n.count for n in with_gpus)):
        most = max(n.gpus for n in nodes)
        return f"--gpus-per-node {asked.gpus_per_node}: partition {name} has {_nodes(fit)} with so many (most: {most})"
    if job.nodes > (fit := sum(n.count for n in with_gpus if n.cpus >= cpus)):
        most = max(n.cpus for n in with_gpus)
        return (
            f"--nproc {job.nproc} x --cpus-per-rank {asked.cpus_per_rank} = {cpus} CPUs on each node: partition {name} "
            f"has {_nodes(fit)} with so many (most: {most})"
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


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"


def _choices(nodes: Sequence[Nodes]) -> str:
    """What there is, a partition each."""
    shown = [
        f"{n.partition} ({_nodes(n.count)} with {n.cpus} CPUs, {n.gpus} GPUs, {n.minutes:.0f} minutes)" for n in nodes
    ]
    more = f", and {len(shown) - LONGEST_LISTED} more: see sinfo" if len(shown) > LONGEST_LISTED else ""
    return f"This cluster has {', '.join(shown[:LONGEST_LISTED])}{more}"
