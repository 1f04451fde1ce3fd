"""What is to run where, as data: a `Job` says what is wanted, a `Plan` the exact commands and what each is told."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.launch.cgroup import usable_cores as usable_cores  # threads_per_rank's first argument
from paceline.launch.guard.pace import AUTO, Windows

GRACE_SECONDS = 3.0  # with the sweep after it still inside the 5 s in which nothing may be left
JOIN_SECONDS = 300.0  # how long the agents of several nodes wait for each other
STOP_GRACE_SECONDS = 30.0  # a step to its end and a checkpoint; also what schedulers leave between SIGTERM and SIGKILL

SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|COOKIE", re.IGNORECASE)  # of environment variables, say
_JSON_VALUE = re.compile(rf'("[^"\s]*(?:{SECRET_NAME.pattern})[^"\s]*":\s*)"(?:[^"\\]|\\.)+"', re.IGNORECASE)
_SHELL_VALUE = re.compile(rf"(?m)^(\s*(?:export\s+)?\w*(?:{SECRET_NAME.pattern})\w*=)\S.*$", re.IGNORECASE)


@dataclass(frozen=True)
class Command:
    """One process to start: `env` is added to the starter's own environment."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Host:
    """One machine to run on: what `ssh` calls it, which port its sshd has, how many workers it takes."""

    name: str
    port: int | None = None  # None: what the user's ssh configuration says
    slots: int | None = None  # None: as many as --nproc says


@dataclass(frozen=True)
class Allocation:
    """What is asked of Slurm, beside the nodes."""

    minutes: int | None = None
    partition: str = ""
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    save_seconds: int = 120  # before the time limit: the run saves and queues again; 0: never
    options: tuple[str, ...] = ()  # any other option of sbatch, key=value


class Shared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is the same on all nodes: set once, for the job, and part of what each agent is told.

    `argv` is the command of one worker, the same for every rank. `threads` is every rank's OMP_NUM_THREADS; 0: the
    node's cores shared among its workers.
    """

    argv: tuple[str, ...]
    nproc: int  # on each node; a host may have a number of its own, which is then in the plan of its node
    run_id: str = ""
    threads: int = 1
    grace_seconds: float = GRACE_SECONDS  # between asking a worker to stop and killing it, when the run has failed
    stop_grace_seconds: float = STOP_GRACE_SECONDS  # the same when the run is told to stop: time to save
    max_restarts: int = 0
    min_nproc: int = 0  # restart with fewer ranks, but never fewer than these; 0: as many as nproc
    stall_after: Windows = AUTO
    nodes: int = 1
    min_nodes: int = 1  # fewer than `nodes`: the run goes on when nodes are lost, with at least these
    secret: str = ""  # 64 hex digits: by it the agents of one job know each other
    join_seconds: float = JOIN_SECONDS
    cwd: str = ""  # the working folder on every node; empty: the agent's own
    env: dict[str, str] = {}
    modules: tuple[str, ...] = ()
    activate: str = ""  # a script to be sourced, or conda:NAME
    plain_store: bool = False  # the workers open the store's port themselves: any script that torchrun could start
    detached: bool = False
    show: Literal["rank 0", "all"] = "rank 0"  # whose output appears on the screen
    preload: bool = False  # workers may be forked from one that has imported everything: our own command, no CUDA


class Job(Shared, frozen=True):
    """What to run, on how many nodes, and how they are reached.

    `attempt_dir` is an existing folder of this attempt alone (logs, failure records); on several nodes node 0's agent
    makes it, inside `run_dir`. `port` is where the ranks of one node, or the agents of several, meet; 0 for any free
    one.
    """

    attempt_dir: Path | None = None
    port: int = 0
    name: str = "run"  # for people: Slurm's job name
    hosts: tuple[Host, ...] = ()  # of ssh, node 0 first; of print, where known
    run_dir: Path | None = None  # on several nodes: node 0's agent takes it and makes the attempt
    submit_dir: Path | None = None  # in it: what was started (plan.json, job.sbatch, config.toml), private
    python: str = sys.executable  # on every node
    ssh: tuple[str, ...] = ("ssh",)  # the user's ssh command
    slurm: Allocation = Allocation()
    torchrun: bool = True  # of print: torchrun's commands, or our agent's


class NodePlan(Shared, frozen=True):
    """What one agent is told: one line of JSON on its stdin, or a private file; never its argv, so that no list of
    processes shows it. `nproc` is this node's; folders, where there are any, mean what they mean in `Job`.
    """

    first_rank: int = 0  # of several nodes: given by node 0's agent when all have come, as are the next two
    world_size: int = 0
    master_addr: str = "127.0.0.1"
    node: int = 0  # -1: the environment (SLURM_NODEID) or the command line says
    port: int = 0  # where the ranks of one node meet
    attempt_dir: str = ""
    run_dir: str = ""
    head: tuple[str, ...] = ()  # names or addresses of node 0, the best first
    head_ports: tuple[int, ...] = ()  # node 0's agent listens on the first of these that is free
    names: tuple[str, ...] = ()  # the nodes' names by number, for people; empty where nobody knows them yet
    group_rank: int = 0  # this node's place among those that take part; given, as the interface, when all have come
    interface: str = ""  # the network interface by which the other nodes are reached
    silence_seconds: float = 0.0  # the lifeline carries a sign of life at least so often; 0: none, only its end counts


def for_node(job: Job, nproc: int) -> dict[str, Any]:
    """The fields of `job`'s NodePlan for a node with `nproc` workers: all but those that say which node it is."""
    same: dict[str, Any] = {name: getattr(job, name) for name in Shared.__struct_fields__}
    folders = {"attempt_dir": str(job.attempt_dir or ""), "run_dir": str(job.run_dir or "")}
    return same | folders | {"nproc": nproc}


@dataclass(frozen=True)
class Plan:
    """What a launcher will do, to the letter; which fields are filled says how.

    `agents` are started and watched by `supervise.run`, and each reads its entry of `nodes` on its stdin. `submit` is
    handed to Slurm. `by_hand` are typed by a person, one on each node. `files` (name -> text) are written into the
    submit folder before, readable by their owner only. `notes` are for people.
    """

    agents: tuple[Command, ...] = ()
    nodes: tuple[NodePlan, ...] = ()
    submit: Command | None = None
    by_hand: tuple[Command, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()


def describe(plan: Plan) -> str:
    """The plan as text, for `--dry-run` and for tests that compare it. Without secrets: it may be shown to others."""
    lines: list[str] = []
    for command, node in zip(plan.agents, plan.nodes, strict=True):
        lines += [f"# {command.name}", f"{_typed(command)} <<'PLAN'"]
        lines += [_masked(msgspec.json.format(msgspec.json.encode(node), indent=2).decode()), "PLAN"]
    for name, text in plan.files.items():
        lines += [f"# the file {name}", _masked(text).rstrip("\n")]
    for command in (plan.submit, *plan.by_hand):
        if command is not None:
            lines += [f"# {command.name}", _typed(command)]
    return "\n".join([*lines, *(f"# {note}" for note in plan.notes)]) + "\n"


def _typed(command: Command) -> str:
    env = [f"{name}={'…' if SECRET_NAME.search(name) else shlex.quote(value)}" for name, value in command.env.items()]
    return " ".join([*env, shlex.join(command.argv)])


def _masked(text: str) -> str:
    """Without the values, in JSON or in a shell's `NAME=value`, whose names look secret."""
    return _SHELL_VALUE.sub(r"\1…", _JSON_VALUE.sub(r'\1"…"', text))


def threads_per_rank(cores: int, nproc: int) -> int:
    """Equal shares of the cores, at least one thread: more threads than cores make every rank slower."""
    return max(1, cores // nproc)
