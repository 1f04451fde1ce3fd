"""What is to run where, as data: a `Job` says what is wanted, a `Plan` the exact commands and what each is told."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from paceline.launch.cgroup import usable_cores as usable_cores  # threads_per_rank's first argument

GRACE_SECONDS = 3.0  # with the sweep after it still inside the 5 s in which nothing may be left
STOP_GRACE_SECONDS = 30.0  # a step to its end and a checkpoint; also what schedulers leave between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Command:
    """One process to start: `env` is added to the starter's own environment."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Job:
    """What to run: `argv` is the command of one worker, the same for every rank.

    `attempt_dir` is an existing folder of this attempt alone (logs, failure records). `threads` is every rank's
    OMP_NUM_THREADS. `port` is that of rank 0's store, 0 for any free one.
    """

    argv: tuple[str, ...]
    nproc: int
    attempt_dir: Path
    run_id: str
    threads: int
    port: int = 0
    grace_seconds: float = GRACE_SECONDS  # between asking a worker to stop and killing it, when the run has failed
    stop_grace_seconds: float = STOP_GRACE_SECONDS  # the same when the run is told to stop: time to save
    max_restarts: int = 0
    min_nproc: int = 0  # restart with fewer ranks, but never fewer than these; 0: as many as nproc


class NodePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one agent is told: one line of JSON on its stdin, never its argv, so that no list of processes shows it."""

    argv: tuple[str, ...]
    nproc: int
    first_rank: int
    world_size: int
    node: int
    master_addr: str
    port: int
    threads: int
    run_id: str
    attempt_dir: str
    grace_seconds: float = GRACE_SECONDS
    stop_grace_seconds: float = STOP_GRACE_SECONDS
    max_restarts: int = 0
    min_nproc: int = 0


@dataclass(frozen=True)
class Plan:
    """The agents to start, and what each of them reads on its stdin, in the same order."""

    agents: tuple[Command, ...]
    nodes: tuple[NodePlan, ...]


def describe(plan: Plan) -> str:
    """The plan as text, for `--dry-run` and for tests that compare it."""
    lines: list[str] = []
    for command, node in zip(plan.agents, plan.nodes, strict=True):
        env = [f"{name}={shlex.quote(value)}" for name, value in command.env.items()]
        lines.append(f"# {command.name}")
        lines.append(" ".join([*env, shlex.join(command.argv)]) + " <<'PLAN'")
        lines.append(msgspec.json.format(msgspec.json.encode(node), indent=2).decode())
        lines.append("PLAN")
    return "\n".join(lines) + "\n"


def threads_per_rank(cores: int, nproc: int) -> int:
    """Equal shares of the cores, at least one thread: more threads than cores make every rank slower."""
    return max(1, cores // nproc)
