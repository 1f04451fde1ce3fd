"""`paceline doctor`: checks that machines are fit to train on, and lists the faults with their fixes."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from rich.console import Console

from paceline.cli import make_parser
from paceline.cli.options import check_positive, parse_shell_command
from paceline.errors import ExitCode, UsageError
from paceline.lab.doctor.report import encode_json, print_checks, run_checks
from paceline.lab.doctor.survey import PROGRAM, PlannedRun, open_host_programs, survey_hosts
from paceline.launch.plan import Command, parse_hosts
from paceline.launch.ssh.plan import session_commands
from paceline.rank.environment import expand_nodes


@dataclass(frozen=True)
class DoctorConfig:
    """Check that machines are fit to train on, and list the fixes. Exit code 1 if a check fails."""

    on: Literal["local", "ssh", "slurm"] = "local"
    """local: this machine. ssh: hosts over ssh. slurm: an allocation of Slurm"""
    hosts: str | None = None
    """ssh: name[:port],name,... or a file with one `name[:port] [slots=N]` per line"""
    ssh: str = "ssh"
    """ssh command, e.g. "ssh -F my_config" """
    nodes: int | None = None
    """Slurm: number of nodes (default: all of the allocation; 1 outside of one)"""
    nproc: int = 1
    """worker processes on each node"""
    threads_per_rank: int | None = None
    """CPU threads of each worker (default: cores / workers)"""
    run_dir: Path | None = None
    """folder in which runs are written (default: runs)"""
    python: str | None = None
    """Python on the nodes (default: the path of this Python)"""
    partition: str | None = None
    """Slurm: partition"""
    time: int = 10
    """Slurm: time limit, minutes"""
    gpus_per_node: int = 0
    """Slurm: GPUs of each node"""
    cpus_per_rank: int = 1
    """Slurm: CPU cores of each worker process"""
    quick: bool = False
    """do not measure the bandwidth"""
    json: bool = False
    """print JSON"""


def main(arguments: Sequence[str]) -> int:
    config: DoctorConfig = make_parser("doctor").parse(arguments)
    _check(config)
    if config.on == "slurm" and "SLURM_JOB_ID" not in os.environ:
        _in_allocation(config, arguments)
    commands, workers = _host_commands(config)
    planned = PlannedRun(
        hosts=tuple(command.name for command in commands),
        workers=workers,
        run_dir=str((config.run_dir or Path("runs")).absolute()),
        threads=config.threads_per_rank or 0,
        quick=config.quick,
    )
    with open_host_programs(commands) as programs:
        report = survey_hosts(planned, programs)
    checks = run_checks(report)
    if config.json:
        print(encode_json(report, checks).decode())
    else:
        print_checks(Console(highlight=False), report, checks)
    return ExitCode.FAILED if any(check.status == "error" for check in checks) else ExitCode.DONE


def _check(config: DoctorConfig) -> None:
    check_positive(config, "nodes", "nproc", "threads_per_rank", "time", "cpus_per_rank")
    if config.on == "ssh" and not config.hosts:
        raise UsageError("--on ssh needs --hosts, e.g. --hosts n1,n2 or --hosts hosts.txt")
    if config.on != "ssh" and config.hosts:
        raise UsageError(f"--hosts is for --on ssh; this is --on {config.on}")
    if config.on != "slurm" and config.nodes:
        raise UsageError(f"--nodes is for --on slurm; this is --on {config.on}")


def _host_commands(config: DoctorConfig) -> tuple[tuple[Command, ...], tuple[int, ...]]:
    program = (config.python or sys.executable, *PROGRAM)
    if config.on == "ssh":
        hosts = parse_hosts(str(config.hosts))
        ssh = parse_shell_command("--ssh", config.ssh)
        if shutil.which(ssh[0]) is None:
            raise UsageError(
                f"--ssh {config.ssh!r}: no such program. Install an OpenSSH client, or use a different one"
            )
        return session_commands(ssh, hosts, *program), tuple(host.slots or config.nproc for host in hosts)
    if config.on == "slurm":
        job, nodes = os.environ["SLURM_JOB_ID"], expand_nodes(os.environ["SLURM_JOB_NODELIST"])
        if config.nodes and config.nodes != len(nodes):
            raise UsageError(
                f"--nodes {config.nodes} within Slurm job {job}, which has {len(nodes)} nodes. "
                "Leave out --nodes, or run the command outside the job"
            )
        cores = config.nproc * config.cpus_per_rank
        step = ("srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--cpus-per-task={cores}",
                "--unbuffered", "--quiet")  # fmt: skip
        commands = tuple(Command(node, (*step, f"--nodelist={node}", *program)) for node in nodes)
        return commands, (config.nproc,) * len(nodes)
    return (Command(os.uname().nodename, program),), (config.nproc,)


def _in_allocation(config: DoctorConfig, arguments: Sequence[str]) -> NoReturn:
    """Run this command again inside a Slurm allocation with the shape of the planned run."""
    options = [f"--nodes={config.nodes or 1}", "--ntasks-per-node=1", f"--time={config.time}", "--job-name=doctor",
               f"--cpus-per-task={config.nproc * config.cpus_per_rank}"]  # fmt: skip
    if config.partition:
        options.append(f"--partition={config.partition}")
    if config.gpus_per_node:
        options.append(f"--gpus-per-node={config.gpus_per_node}")
    if shutil.which("salloc") is None:
        raise UsageError("--on slurm: there is no salloc here. Log in to a node of the cluster, or use --on ssh")
    command = ["salloc", "--quiet", *options, sys.executable, "-P", "-m", "paceline", "doctor", *arguments]
    print("waiting for Slurm to grant the nodes ...", file=sys.stderr, flush=True)
    try:
        os.execvp(command[0], command)  # not a child: salloc gets the signals, and no process is left if it is killed
    except OSError as error:
        raise UsageError(f"cannot start salloc: {error.strerror}") from None
