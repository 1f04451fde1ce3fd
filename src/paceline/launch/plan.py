"""The plan of a launcher, as data: the hosts, the exact commands, the plan that each agent receives; and its record.

RUN/submit-1/         each start on other machines has a private folder, numbered from 1
    config.toml       the workers' settings
    plan.json         what the agents are sent, the job's secret included
    job.sbatch        for Slurm: the batch script; slurm-<job>.out has its output and the agents'
    submitted.json    a Submission
"""

import ipaddress
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import asdict, replace

from paceline.config.choices import LauncherName
from paceline.errors import TrainingError, UsageError
from paceline.protocol.control import SECRET_NAME
from paceline.protocol.job import Host, JobSpec, NodePlan, NodeRanks, head_ports, plain_name
from paceline.runs import writing
from paceline.runs.folder import MOST_STARTS, attempt_number
from paceline.runs.reading import decode, names, read

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
    """The actions of a launcher; the fields that are filled show how it starts the job.

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
    """The plan for one node: `nproc` workers, by default the job's number; `node` is -1 if its agent learns it.

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


# ---- hosts ----

MAX_FILE_BYTES = 1 << 20
MAX_SLOTS = 1024

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # no leading '-': ssh would take it for an option
_ADDRESS = re.compile(r"(?:(?P<user>[^@]*)@)?(?P<name>\[[^\[\]]*\]|[^:\[\]@]*)(?::(?P<port>.*))?", re.DOTALL)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of `--hosts TEXT`, node 0 first; a name is user@name, name or an address, IPv6 in brackets.

    A file is meant when TEXT has a `/` or ends in `.txt`: a file of the working folder must not take a host's place.

    Raises:
        UsageError: every mistake at once, each with its line.
    """
    path = Path(text)
    is_file = "/" in text or text.endswith(".txt")
    listed = ((f"host {index}", item.split() or [""]) for index, item in enumerate(text.split(","), start=1))
    hosts: list[Host] = []
    wrong: list[str] = []
    seen: dict[tuple[str, int | None], str] = {}
    for place, words in _file_entries(path) if is_file else listed:
        try:
            host = _host(words)
        except ValueError as error:
            wrong.append(f"{place}: {error}")
            continue
        key = (plain_name(host).lower(), host.port)
        if key in seen:
            wrong.append(f"{place}: {words[0]} is already there ({seen[key]}); more workers: slots=N or --nproc")
        seen.setdefault(key, place)
        hosts.append(host)
    if wrong:
        asked = f"the hosts file {text}" if is_file else f"--hosts {text}"
        raise UsageError(code="hosts-wrong", value=asked, wrong="\n  ".join(wrong))
    if not hosts:
        raise UsageError(code="no-host", value=text)
    return tuple(hosts)


def _file_entries(path: Path) -> Iterator[tuple[str, list[str]]]:
    try:
        lines = read(path.resolve(), limit_bytes=MAX_FILE_BYTES).decode().splitlines()
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(code="hosts-unreadable", path=path, reason=reason) from error
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            yield f"line {number}", words


def _host(words: list[str]) -> Host:
    """The host that one line describes; ValueError has the mistake."""
    address, *options = words
    slots: int | None = None
    for option in options:
        name, _, value = option.partition("=")
        if name != "slots":
            raise ValueError(f"unknown option {option!r} of {address}. There is only slots=N, and one host a line")
        if slots is not None:
            raise ValueError(f"slots= twice for {address}")
        slots = _number("slots", value, MAX_SLOTS)
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError(f"{address!r} is not a host: write name, name:port, user@name, or [IPv6]:port")
    user, name, port = found["user"], found["name"], found["port"]
    if user is not None and not _USER.fullmatch(user):
        raise ValueError(f"{user!r} in {address!r} is not a user's name")
    if not _is_ipv6(name) and not _NAME.fullmatch(name):
        allowed = "letters, digits, '.', '_' and '-', a letter or digit first; or an address, IPv6 in brackets"
        raise ValueError(f"{name!r} is not a host's name ({allowed})")
    at_user = f"{user}@" if user is not None else ""
    return Host(at_user + name, None if port is None else _number("port", port, 65535), slots)


def _is_ipv6(name: str) -> bool:
    with suppress(ValueError):
        return name.startswith("[") and name.endswith("]") and bool(ipaddress.IPv6Address(name[1:-1]))
    return False


def _number(name: str, text: str, largest: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= largest:
        raise ValueError(f"{name} must be a number from 1 to {largest}, got {text!r}")
    return int(text)


# ---- the record of a start ----

SUBMITTED = "submitted.json"
MAX_LOOKED_AT, MAX_BYTES = 10, 1 << 18


class Submission(msgspec.Struct, frozen=True):
    """One start of a run. `started_at` is Unix time; hosts are as `ssh` calls them, node 0 first."""

    on: LauncherName
    started_at: float
    nodes: int = 1
    hosts: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()  # the command that was used, for people; never run again
    slurm_job: Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{0,12}\Z")] = ""  # empty: run inside an allocation
    command: tuple[str, ...] = ()  # as it was typed
    cwd: str = ""


def next_submit_dir(run_dir: Path) -> Path:
    """Make the folder of a run's next start.

    Raises:
        UsageError: if it cannot be made.
    """
    try:
        writing.make_folder(run_dir, exist_ok=True)
        while True:
            number = 1 + max((submit_number(Path(name)) for name in names(run_dir)), default=0)
            if number > MOST_STARTS:
                raise UsageError(code="submit-out-of-range", run_dir=run_dir, number=number - 1)
            try:
                writing.make_folder(run_dir / f"submit-{number}")
            except FileExistsError:  # another launcher was faster
                continue
            return run_dir / f"submit-{number}"
    except OSError as error:
        raise UsageError(code="run-dir-not-writable", folder=run_dir, strerror=error.strerror) from None


def submit_number(folder: Path) -> int:
    """The number of the start to which a folder belongs; 0 if its name has none."""
    return attempt_number(folder, "submit")


def write_files(submit_dir: Path, files: Mapping[str, str]) -> None:
    """Write a plan's files, each completely or not at all, readable by their owner only.

    Raises:
        TrainingError: if a file cannot be written, for example on a full disk.
    """
    for name, text in files.items():
        try:
            writing.replace(submit_dir / name, text.encode(), sync=True)
        except OSError as error:
            raise TrainingError(code="settings-not-written", path=submit_dir / name, strerror=error.strerror) from None


def write_submission(submit_dir: Path, submission: Submission) -> None:
    """Write the record of a start, completely or not at all.

    Raises:
        TrainingError: if it cannot be written, for example on a full disk.
    """
    write_files(submit_dir, {SUBMITTED: msgspec.json.format(msgspec.json.encode(submission)).decode() + "\n"})


def last_submission(run_dir: Path) -> tuple[Path, Submission | None]:
    """The newest recorded start, with its folder; the run folder and None if all starts were on this machine."""
    folders = [run_dir / name for name in names(run_dir) if submit_number(Path(name))]
    for folder in sorted(folders, key=submit_number, reverse=True)[:MAX_LOOKED_AT]:
        try:
            return folder, decode(folder / SUBMITTED, Submission, limit_bytes=MAX_BYTES)
        except OSError:  # it was refused before it started
            continue
    return run_dir, None
