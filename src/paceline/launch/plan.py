"""What a launcher does with a job, as data: the exact commands, and the plan that each agent receives."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import asdict, replace

from paceline.contract.job import JobSpec, NodePlan, NodeRanks, head_ports
from paceline.contract.variables import SECRET_NAME

_JSON_VALUE = re.compile(rf'("[^"\s]*(?:{SECRET_NAME.pattern})[^"\s]*":\s*)"(?:[^"\\]|\\.)+"', re.IGNORECASE)
_SHELL_VALUE = re.compile(rf"(?m)^(\s*(?:export\s+)?\w*(?:{SECRET_NAME.pattern})\w*=)\S.*$", re.IGNORECASE)


@dataclass(frozen=True)
class Command:
    """One process to start: `env` is added to the starter's own environment."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])


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


def local(job: JobSpec) -> Plan:
    """The plan for all ranks on this machine: one agent. Pure, as every launcher: it looks up and starts nothing."""
    # -P: without it python -m puts the working directory first on sys.path, and a user's random.py or select.py there
    # would take the place of the standard library's in the agent
    return Plan(
        agents=(Command("agent 0", (job.python, "-P", "-m", "paceline.launch.agent")),), nodes=(node_plan(job),)
    )


def node_plan(job: JobSpec, node: int = 0, *, nproc: int = 0, head: tuple[str, ...] = ()) -> NodePlan:
    """The plan for one node: `nproc` workers, by default as many as the job says; `node` is -1 if its agent learns it.

    On one node the ranks meet at the job's port. On several nodes the head agent listens there.
    """
    plan = replace(NodePlan(**asdict(job)), node=node, nproc=nproc or job.nproc, head=head)
    if job.nodes > 1:
        return replace(plan, head_ports=head_ports(job))
    return replace(plan, ranks=NodeRanks(master_port=job.port))


def as_file(plan: NodePlan) -> str:
    """The text of a plan file, for an agent that reads no stdin."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n"


def describe(plan: Plan) -> str:
    """The plan as text, for `--dry-run` and for tests that compare it. Without secrets: it may be shown to others."""
    lines: list[str] = []
    for command, node in zip(plan.agents, plan.nodes, strict=True):
        lines += [f"# {command.name}", f"{_typed(command)} <<'PLAN'", _masked(as_file(node)) + "PLAN"]
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
