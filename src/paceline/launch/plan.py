"""The plan of a launcher, as data: hosts, exact commands, and the plan of each agent. Also the record of a start.

RUN/submit-1/         each start on other machines has a private folder, numbered from 1
    config.toml       the settings of the workers
    plan.json         the plan that the agents receive, with the secret of the job
    job.sbatch        for Slurm: the batch script; slurm-<job>.out has its output and that of the agents
    submitted.json    a SubmitRecord
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
from paceline.protocol.job import Host, JobSpec, NodePlan, NodeRanks, address_without_user, node0_ports
from paceline.runs import writing
from paceline.runs.folder import MAX_ATTEMPTS, attempt_number
from paceline.runs.reading import list_names, read_file, read_json

_JSON_VALUE = re.compile(rf'("[^"\s]*(?:{SECRET_NAME.pattern})[^"\s]*":\s*)"(?:[^"\\]|\\.)+"', re.IGNORECASE)


@dataclass(frozen=True)
class Command:
    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Plan:
    """The actions of a launcher. A launcher fills only the fields that it uses.

    `supervise.run` starts and watches the `agents`; each reads its entry of `nodes` on its stdin. Slurm runs
    `submit_command`. The user types the `manual_commands`, one on each node. `files` (name -> text) are first written
    into the submit folder, readable by their owner only. `notes` are for the user.
    """

    agents: tuple[Command, ...] = ()
    nodes: tuple[NodePlan, ...] = ()
    submit_command: Command | None = None
    manual_commands: tuple[Command, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()


def plan_local(job: JobSpec) -> Plan:
    """The plan for all ranks on this machine: one agent. Pure, as every launcher: it looks up and starts nothing."""
    # -P: without it `python -m` puts the working folder first on sys.path. The agent would import a random.py or
    # select.py of the user from there, instead of the module of the standard library
    agent = Command("agent 0", (job.python, "-P", "-m", "paceline.launch.agent"))
    return Plan(agents=(agent,), nodes=(node_plan(job),))


def node_plan(job: JobSpec, node: int = 0, *, nproc: int = 0, node0: tuple[str, ...] = ()) -> NodePlan:
    """The plan for one node with `nproc` workers (default: those of the job). If `node` is -1, its agent determines it.

    On a single node, the ranks rendezvous at the job's port. On several nodes, the coordinator listens at this port.
    """
    plan = replace(NodePlan(**asdict(job)), node=node, nproc=nproc or job.nproc, node0=node0)
    if job.nodes > 1:
        return replace(plan, node0_ports=node0_ports(job))
    return replace(plan, ranks=NodeRanks(master_port=job.port))


def format_plan_file(plan: NodePlan) -> str:
    return msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n"


def format_plan(plan: Plan) -> str:
    """The plan as text, for `--dry-run`. It contains no secrets, since users may show it to others."""
    lines: list[str] = []
    for command, node in zip(plan.agents, plan.nodes, strict=True):
        lines += [f"# {command.name}", f"{format_command(command)} <<'PLAN'", _masked(format_plan_file(node)) + "PLAN"]
    for name, text in plan.files.items():
        lines += [f"# the file {name}", _masked(text).rstrip("\n")]
    if (command := plan.submit_command) is not None:
        lines += [f"# {command.name}", format_command(command)]
    return "\n".join(lines) + "\n"


def format_command(command: Command) -> str:
    env = [f"{name}={'…' if SECRET_NAME.search(name) else shlex.quote(value)}" for name, value in command.env.items()]
    return " ".join([*env, shlex.join(command.argv)])


def _masked(text: str) -> str:
    """JSON with masked values, if their names look secret. No other text of a plan contains secrets."""
    return _JSON_VALUE.sub(r'\1"…"', text)


# ---- hosts ----

MAX_HOSTFILE_BYTES = 1 << 20
MAX_SLOTS = 1024

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # no leading '-': ssh would interpret it as an option
_ADDRESS = re.compile(r"(?:(?P<user>[^@]*)@)?(?P<name>\[[^\[\]]*\]|[^:\[\]@]*)(?::(?P<port>.*))?", re.DOTALL)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of `--hosts TEXT`, node 0 first.

    A host is user@name, a name, or an address (IPv6 in brackets). TEXT is a file if it contains `/` or ends in `.txt`.
    A file in the working folder with the name of a host is ignored.
    """
    path = Path(text)
    is_file = "/" in text or text.endswith(".txt")
    entries = ((f"host {index}", item.split() or [""]) for index, item in enumerate(text.split(","), start=1))
    hosts: list[Host] = []
    wrong: list[str] = []
    seen: dict[tuple[str, int | None], str] = {}
    for place, entry in _file_entries(path) if is_file else entries:
        try:
            hosts.append(host := _host(entry))
            first = seen.setdefault((address_without_user(host).lower(), host.port), place)
            if first != place:
                raise ValueError(f"{entry[0]} is listed twice (see {first}). For more workers: slots=N or --nproc")
        except ValueError as error:
            wrong.append(f"{place}: {error}")
    if wrong:
        source = f"the hosts file {text}" if is_file else f"--hosts {text}"
        raise UsageError(code="hosts-wrong", value=source, wrong="\n  ".join(wrong))
    if not hosts:
        raise UsageError(code="no-host", value=text)
    return tuple(hosts)


def _file_entries(path: Path) -> Iterator[tuple[str, list[str]]]:
    try:
        lines = read_file(path.resolve(), limit_bytes=MAX_HOSTFILE_BYTES).decode().splitlines()
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(code="hosts-unreadable", path=path, reason=reason) from error
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].split()
        if entry:
            yield f"line {number}", entry


def _host(entry: list[str]) -> Host:
    address, *options = entry
    slots: int | None = None
    for option in options:
        name, _, value = option.partition("=")
        if name != "slots":
            raise ValueError(f"unknown option {option!r} of {address}. Only slots=N may follow a host")
        if slots is not None:
            raise ValueError(f"slots= twice for {address}")
        slots = _number("slots", value, MAX_SLOTS)
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(f"{address!r} is not a host. Use name, name:port, user@name, or [IPv6]:port")
    user, name, port = match["user"], match["name"], match["port"]
    if user is not None and not _USER.fullmatch(user):
        raise ValueError(f"{user!r} in {address!r} is not a valid user name")
    if not _is_ipv6(name) and not _NAME.fullmatch(name):
        allowed = "letters, digits, '.', '_' and '-', a letter or digit first; or an address, IPv6 in brackets"
        raise ValueError(f"{name!r} is not a valid host name ({allowed})")
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

SUBMISSION_FILE = "submitted.json"
MAX_LOOKED_AT, MAX_BYTES = 10, 1 << 18


class SubmitRecord(msgspec.Struct, frozen=True):
    """One start of a run. `started_at` is Unix time. `hosts` are the names for ssh, node 0 first."""

    on: LauncherName
    started_at: float
    nodes: int = 1
    hosts: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()  # the ssh command of the start, for information; never run again
    slurm_job: Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{0,12}\Z")] = ""  # empty: run inside an allocation
    command: tuple[str, ...] = ()  # the command line
    cwd: str = ""


def make_submit_dir(run_dir: Path) -> Path:
    """Make the folder of the next start. The caller holds the lock of the run folder."""
    try:
        number = 1 + max((submit_number(Path(name)) for name in list_names(run_dir)), default=0)
        if number > MAX_ATTEMPTS:
            raise UsageError(code="submit-out-of-range", run_dir=run_dir, number=number - 1)
        writing.make_folder(run_dir / f"submit-{number}")
    except OSError as error:
        raise UsageError(code="run-dir-not-writable", folder=run_dir, strerror=error.strerror) from None
    return run_dir / f"submit-{number}"


def submit_number(folder: Path) -> int:
    return attempt_number(folder, "submit")


def write_plan_files(submit_dir: Path, files: Mapping[str, str]) -> None:
    """Write the files of a plan atomically, readable by their owner only."""
    for name, text in files.items():
        try:
            writing.replace_file(submit_dir / name, text.encode(), sync=True)
        except OSError as error:
            raise TrainingError(code="settings-not-written", path=submit_dir / name, strerror=error.strerror) from None


def write_submit_record(submit_dir: Path, submission: SubmitRecord) -> None:
    content = msgspec.json.format(msgspec.json.encode(submission)).decode()
    write_plan_files(submit_dir, {SUBMISSION_FILE: content + "\n"})


def read_last_submission(run_dir: Path) -> tuple[Path, SubmitRecord | None]:
    """The newest recorded start, with its folder; the run folder and None if all starts were on this machine."""
    folders = [run_dir / name for name in list_names(run_dir) if submit_number(Path(name))]
    for folder in sorted(folders, key=submit_number, reverse=True)[:MAX_LOOKED_AT]:
        try:
            return folder, read_json(folder / SUBMISSION_FILE, SubmitRecord, limit_bytes=MAX_BYTES)
        except OSError:  # this start failed before its record was written
            continue
    return run_dir, None
