"""How is each host's program started: here, by ssh, or as a step of a Slurm job? Commands only; nothing is run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from paceline.doctor.session import PROGRAM
from paceline.launch.hosts import labels
from paceline.launch.job import Command, Host
from paceline.launch.ssh.plan import client, destination


def here(python: str, name: str) -> Command:
    """On this machine."""
    return Command(name, (python, *PROGRAM))


def by_ssh(ssh: Sequence[str], hosts: tuple[Host, ...], python: str) -> tuple[Command, ...]:
    """By the user's ssh, as a run is started, with nothing of the user's but the path of Python on the command line."""
    remote = f"exec {shlex.join((python, *PROGRAM))}"
    return tuple(
        Command(label, (*client(ssh, host), "--", destination(host), remote))
        for label, host in zip(labels(hosts), hosts, strict=True)
    )


def in_slurm(job_id: str, nodes: Sequence[str], cores: int, python: str) -> tuple[Command, ...]:
    """As one step on each node of an allocation, beside whatever runs there, with so many cores of it."""
    options = ("--overlap", "--nodes=1", "--ntasks=1", f"--cpus-per-task={cores}", "--unbuffered", "--quiet")
    return tuple(
        Command(node, ("srun", f"--jobid={job_id}", f"--nodelist={node}", *options, python, *PROGRAM)) for node in nodes
    )
