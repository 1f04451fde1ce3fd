"""What is to run where, as data: a `Job` says what is wanted, a `Plan` the exact commands and what each is told."""

import hashlib
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.contract.node_plan import NodePlan, Shared
from paceline.contract.variables import SECRET_NAME

FIRST_PORT, PORTS = 20000, 10000  # below the ports that kernels give to outgoing connections (Linux: from 32768)
NUM_PORTS = 8
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


GPU_CORES = 8  # of a rank with a GPU: it prepares batches, and launches kernels without a pause


@dataclass(frozen=True)
class Allocation:
    """What is asked of Slurm, beside the nodes."""

    minutes: int | None = None
    partition: str = ""
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    save_seconds: int = 120  # before the time limit: the run saves and queues again; 0: never
    options: tuple[str, ...] = ()  # any other option of sbatch, key=value


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


def for_node(job: Job, nproc: int) -> dict[str, Any]:
    """The fields of `job`'s NodePlan for a node with `nproc` workers: all but those that say which node it is."""
    same: dict[str, Any] = {name: getattr(job, name) for name in Shared.__struct_fields__}
    folders = {"attempt_dir": str(job.attempt_dir or ""), "run_dir": str(job.run_dir or "")}
    return same | folders | {"nproc": nproc}


def plain_name(host: Host) -> str:
    """What other machines call it: without the user, and an IPv6 address without brackets."""
    return host.name.rpartition("@")[2].strip("[]")


def labels(hosts: tuple[Host, ...]) -> tuple[str, ...]:
    """What people are shown: the plain names; with the port where two have the same."""
    names = [plain_name(host) for host in hosts]
    return tuple(
        f"{name}:{host.port}" if host.port and names.count(name) > 1 else name
        for name, host in zip(names, hosts, strict=True)
    )


def node_plan(job: Job, *, node: int, nproc: int, head: tuple[str, ...], silence_seconds: float = 0.0) -> NodePlan:
    """The plan for one node; `node` is -1 where its agent learns it elsewhere."""
    return NodePlan(
        **for_node(job, nproc),
        node=node,
        port=job.port if job.nodes == 1 else 0,  # of several nodes the head listens at it, and the ranks cannot as well
        head=head,
        head_ports=head_ports(job),
        names=labels(job.hosts),
        silence_seconds=silence_seconds,
    )


def head_ports(job: Job) -> tuple[int, ...]:
    """Where node 0's agent may listen: the port that was asked for; or some, the same for all nodes of the run."""
    if job.port:
        return (job.port,)
    digest = hashlib.sha256(job.run_id.encode()).digest()
    first = int.from_bytes(digest[:4]) % PORTS
    stride = 2 * (int.from_bytes(digest[4:8]) % 2000) + 1
    return tuple(FIRST_PORT + (first + k * stride) % PORTS for k in range(NUM_PORTS))


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
