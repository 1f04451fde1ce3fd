"""Runs on other machines: convert settings to a job, and start the job by ssh, Slurm or printed commands."""

import dataclasses
import os
import secrets
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from paceline.cli.options import check_positive, parse_shell_command
from paceline.config.choices import LauncherName, launchers_supporting_setting
from paceline.config.settings import ClusterConfig
from paceline.errors import ExitCode, UsageError
from paceline.host.shell_environment import parse_env_options
from paceline.launch.by_hand import format_commands, plan_by_hand
from paceline.launch.plan import (
    Plan,
    SubmitRecord,
    format_plan,
    make_submit_dir,
    parse_hosts,
    plan_local,
    write_plan_files,
    write_submit_record,
)
from paceline.launch.slurm import queue
from paceline.launch.slurm.plan import SCRIPT_FILE, plan_slurm
from paceline.launch.ssh.plan import plan_ssh, rsync_commands, run_rsync
from paceline.launch.supervise import run
from paceline.protocol.balance import AUTO, expand_to_rank_speeds, parse_balance
from paceline.protocol.control import SECRET_NAME
from paceline.protocol.job import CORES_PER_GPU_RANK, AllocationRequest, Host, JobSpec
from paceline.runs.console import print_to_stderr
from paceline.runs.folder import archive_checkpoints, lock_run_dir, new_run_dir_path, set_up_run_dir

PlanFunction = Callable[[JobSpec], Plan]
LAUNCHERS: dict[LauncherName, PlanFunction] = {
    "local": plan_local,
    "ssh": plan_ssh,
    "slurm": plan_slurm,
    "print": plan_by_hand,
}
FOLLOW_UP_HINT = "paceline status {} shows the progress; also: paceline logs, paceline cancel"


def check_cluster_options(cluster: ClusterConfig) -> None:
    for field in dataclasses.fields(cluster):
        allowed = launchers_supporting_setting(field.name)
        if cluster.on not in allowed and getattr(cluster, field.name) != field.default:
            raise UsageError(code="option-of-another-launcher", setting=field.name, allowed=allowed, value=cluster.on)
    if cluster.join_timeout <= 0:
        raise UsageError(code="join-timeout-not-positive", value=cluster.join_timeout)
    check_positive(cluster, "cpus_per_rank")
    no_agent = cluster.on == "print" and cluster.agent == "torchrun"
    if cluster.on_event is not None and (no_agent or not cluster.on_event.strip()):
        why = "torchrun runs no command; add --agent paceline" if no_agent else "the command is empty"
        raise UsageError(code="on-event-not-run", why=why, value=cluster.on_event)
    speeds = parse_balance(cluster.balance)
    if cluster.balance is not None and no_agent:
        raise UsageError(code="balance-without-agent", value=cluster.balance)
    if speeds and ":" in (cluster.nodes or ""):
        raise UsageError(code="balance-of-changing-ranks", value=cluster.balance, setting="--nodes MIN:MAX")
    if cluster.cancel_on_interrupt and not cluster.follow:
        raise UsageError(code="cancel-without-follow")


def make_job_spec(cluster: ClusterConfig, nproc: int | None) -> JobSpec:
    """A job with its nodes, its hosts and the way to reach them. The caller fills in the other fields later."""
    check_cluster_options(cluster)
    hosts = parse_hosts(cluster.hosts) if cluster.hosts is not None else ()
    if cluster.on == "ssh" and not hosts:
        raise UsageError(code="ssh-without-hosts")
    min_nodes, max_nodes = _nodes(cluster.nodes, hosts)
    if cluster.on == "local" and max_nodes > 1:
        raise UsageError(code="several-nodes-here", value=cluster.nodes)
    return JobSpec(
        argv=(),
        nproc=nproc or cluster.gpus_per_node or 1,
        run_id=secrets.token_hex(8),
        threads=0,
        nodes=max_nodes,
        min_nodes=min_nodes,
        hosts=hosts,
        secret="" if cluster.on == "local" else secrets.token_hex(32),  # a single agent has no peers
        join_seconds=cluster.join_timeout,
        cwd=str(Path.cwd()),
        python=cluster.python or sys.executable,
        env=parse_env_options(cluster.env, os.environ),
        modules=cluster.module,
        activate=cluster.activate or "",
        on_event=cluster.on_event or "",
        balance=cluster.balance or "",
        detached=cluster.detach,
        ssh=parse_shell_command("--ssh", cluster.ssh),
        slurm=AllocationRequest(
            minutes=cluster.time,
            partition=cluster.partition or "",
            gpus_per_node=cluster.gpus_per_node or 0,
            cpus_per_rank=cluster.cpus_per_rank or (CORES_PER_GPU_RANK if cluster.gpus_per_node else 1),
            save_seconds=cluster.save_before,
            options=cluster.sbatch,
        ),
        torchrun=cluster.agent == "torchrun",
    )


def check_balance_option(job: JobSpec) -> None:
    if job.balance == AUTO and job.hang_timeout.off:
        raise UsageError(code="balance-without-guard", value=job.balance)
    if speeds := parse_balance(job.balance or None):
        expand_to_rank_speeds(speeds, nproc_by_node(job))


def _nodes(nodes: str | None, hosts: tuple[Host, ...]) -> tuple[int, int]:
    """The smallest and the largest number of nodes, from --nodes N or MIN:MAX."""
    if nodes is None:
        return max(1, len(hosts)), max(1, len(hosts))
    min_nodes, colon, max_nodes = nodes.partition(":")
    max_nodes = max_nodes if colon else min_nodes
    if not (min_nodes.isdecimal() and max_nodes.isdecimal()):
        raise UsageError(code="nodes-not-a-number", value=nodes)
    if not 1 <= int(min_nodes) <= int(max_nodes):
        raise UsageError(code="nodes-out-of-range", value=nodes)
    if hosts and not int(min_nodes) <= len(hosts) <= int(max_nodes):
        raise UsageError(code="nodes-and-hosts-differ", value=nodes, count=len(hosts))
    return int(min_nodes), int(max_nodes)


def nproc_by_node(job: JobSpec) -> list[int]:
    """The number of processes on each node, including nodes that may join later."""
    slots = [host.slots or job.nproc for host in job.hosts]
    return [*slots, *[job.nproc] * (job.nodes - len(slots))]


def make_dry_run_job(job: JobSpec, asked: Path | None, name: str) -> JobSpec:
    run_dir = (asked or new_run_dir_path(name)).absolute()
    return replace(job, run_dir=str(run_dir), submit_dir=str(run_dir / "submit-1"))


def show_plan(cluster: ClusterConfig, job: JobSpec) -> int:
    plan = LAUNCHERS[cluster.on](job)
    print(format_commands(plan) if cluster.on == "print" else format_plan(plan), end="")
    return ExitCode.DONE


@contextmanager
def locked_run_dir(
    asked: Path | None, name: str, *, trust: bool, resume: bool = False, restart: bool = False
) -> Generator[tuple[Path, int]]:
    """The folder of the run to start, and its lock, held inside the context. `restart` moves earlier results aside."""
    run_dir = set_up_run_dir(asked, name, resume=resume, trust=trust)
    lock = lock_run_dir(run_dir)
    try:
        if restart:
            archive_checkpoints(run_dir)
        yield run_dir, lock
    finally:
        os.close(lock)


def with_submit_dir(job: JobSpec, settings: str = "") -> JobSpec:
    """Make the submit folder of this start. `settings`: the text of config.toml for the workers; empty: write none."""
    submit_dir = make_submit_dir(Path(job.run_dir))
    if settings:
        write_plan_files(submit_dir, {"config.toml": settings})
    return replace(job, submit_dir=str(submit_dir))


def start(cluster: ClusterConfig, job: JobSpec) -> int:
    if cluster.on == "slurm":
        return _start_slurm(cluster, job)
    plan = LAUNCHERS[cluster.on](job)
    write_plan_files(Path(job.submit_dir), plan.files)
    if cluster.sync:
        run_rsync(rsync_commands(job))
    _record(cluster, job)
    if cluster.on == "print":
        print(format_commands(plan), end="")
        return ExitCode.DONE
    code = run(plan)
    if job.detached and code == ExitCode.DONE:
        print_to_stderr(f"started. {FOLLOW_UP_HINT.format(job.run_dir)}")
    return code


def _start_slurm(cluster: ClusterConfig, job: JobSpec) -> int:
    submit_dir = Path(job.submit_dir)
    allocation = queue.current_allocation(os.environ)
    if cluster.cpus_per_rank is None and job.slurm.gpus_per_node:
        cores = min(CORES_PER_GPU_RANK, queue.cores_per_rank(allocation, job, os.environ))
        job = replace(job, slurm=replace(job.slurm, cpus_per_rank=cores))
    if allocation is not None:
        queue.check_job_fits_allocation(allocation, job)
    plan = plan_slurm(job)
    write_plan_files(submit_dir, plan.files)
    if allocation is None:
        queue.check_job_fits_partitions(job, os.environ)
    _record(cluster, job)  # also before it is submitted: the run is known even if this process is killed now
    if allocation is not None:
        return queue.run_in_allocation(submit_dir / SCRIPT_FILE)
    job_id = queue.submit(plan, os.environ)
    _record(cluster, job, job_id)
    print_to_stderr(f"submitted as Slurm job {job_id}; batch script: {submit_dir / SCRIPT_FILE}")
    if not cluster.follow:
        print_to_stderr(FOLLOW_UP_HINT.format(job.run_dir))
        return ExitCode.DONE
    output = submit_dir / f"slurm-{job_id}.out"
    return queue.follow_job(job_id, output, cancel_on_interrupt=cluster.cancel_on_interrupt)


def _record(cluster: ClusterConfig, job: JobSpec, slurm_job: str = "") -> None:
    submission = SubmitRecord(
        on=cluster.on, started_at=time.time(), nodes=job.nodes,
        hosts=tuple(host.name if host.port is None else f"{host.name}:{host.port}" for host in job.hosts),
        ssh=job.ssh if cluster.on == "ssh" else (), slurm_job=slurm_job, command=_without_secrets(sys.argv),
        cwd=job.cwd,
    )  # fmt: skip
    write_submit_record(Path(job.submit_dir), submission)


def _without_secrets(command: Sequence[str]) -> tuple[str, ...]:
    """The command line with masked values of --env variables whose names look secret."""
    masked = list(command)
    for index, (before, word) in enumerate(zip(("", *command), command, strict=False)):
        setting = word if before == "--env" else word.removeprefix("--env=") if word.startswith("--env=") else ""
        name, equals, _ = setting.partition("=")
        if equals and SECRET_NAME.search(name):
            masked[index] = word.removesuffix(setting) + f"{name}=…"
    return tuple(masked)
