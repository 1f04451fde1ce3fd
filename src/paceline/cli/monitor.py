"""`paceline monitor`: the present use of machines, and the processes that use them. It needs no run."""

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.cli import make_parser
from paceline.cli.options import parse_shell_command, print_json, ssh_argv
from paceline.errors import ExitCode, UsageError
from paceline.host.node_utilization import NodeUtilizationReader
from paceline.protocol.control import RUN_ID
from paceline.report.watch_lines import format_gpu_use
from paceline.runs.console import format_size, shorten, table_console
from paceline.runs.machine import NodeUtilization

EVERY_SECONDS = 1.0
SSH_SECONDS = 30.0
MAX_SHOWN_PROCESSES = 8
GPU_QUERY_TIMEOUT_SECONDS = 3.0  # for the driver's first answer


class ProcessUse(msgspec.Struct, frozen=True, omit_defaults=True):
    pid: int
    user: str
    program: str = msgspec.field(name="words")  # and its script; no further arguments, which may hold passwords
    cores: float
    memory_bytes: int
    gpu_bytes: int = 0
    run: str = ""  # if the process is a rank of a paceline run: the id of the run, and the rank


class NodeUsage(msgspec.Struct, frozen=True):
    name: str
    use: NodeUtilization | None = None
    processes: tuple[ProcessUse, ...] = ()
    failure: str = ""


class NodeUsageSampler:
    """Samples this machine. Rates are averages since the previous sample."""

    def __init__(self) -> None:
        self._reader = NodeUtilizationReader()
        self._reader.gpus.latest(GPU_QUERY_TIMEOUT_SECONDS)
        self._look()

    def sample(self) -> NodeUsage:
        use = self._reader.sample({})
        return NodeUsage(use.host, use, self._look())

    def _look(self) -> tuple[ProcessUse, ...]:
        gpu = self._reader.gpus.latest().memory_bytes_by_pid
        cores: dict[psutil.Process, float] = {}
        for process in psutil.process_iter():  # the same objects as before: each remembers its CPU time
            with suppress(psutil.Error):
                cores[process] = process.cpu_percent() / 100
        top = sorted(cores, key=lambda process: (-gpu.get(process.pid, 0), -cores[process]))[:MAX_SHOWN_PROCESSES]
        return tuple(_process_use(p, cores[p], gpu.get(p.pid, 0)) for p in top if cores[p] >= 0.01 or p.pid in gpu)


def _process_use(process: psutil.Process, cores: float, gpu_bytes: int) -> ProcessUse:
    program, user, memory_bytes, run = "", "?", 0, ""
    with suppress(psutil.Error):
        program = _program(process.cmdline() or [process.name()])
        user, memory_bytes = process.username(), process.memory_info().rss
    with suppress(psutil.Error):  # the environment of another user cannot be read
        env = process.environ()
        if RUN_ID in env and "RANK" in env:
            run = f"{env[RUN_ID]} rank {env['RANK']}"[:100]
    return ProcessUse(process.pid, user, program, round(cores, 2), memory_bytes, gpu_bytes, run)


def _program(command: list[str]) -> str:
    arguments = command[1:4]
    script = "-c" if "-c" in arguments else next((arg for arg in arguments if not arg.startswith("-")), "")
    return f"{Path(command[0]).name} {script}".strip()[:200]


@dataclass(frozen=True)
class MonitorConfig:
    """Show live use of cores, memory, network and GPUs, and the processes that use them. Ctrl-C ends it."""

    hosts: str = ""
    """hosts to monitor over ssh, separated by commas (default: this one). They need paceline at the same path"""
    once: bool = False
    """print once and end, as without a terminal"""
    json: bool = False
    """print a JSON list of machines, once"""
    ssh: str = "ssh"
    """ssh command to reach the hosts"""
    python: str = sys.executable
    """Python on the hosts (default: the path of this Python)"""


def main(arguments: Sequence[str]) -> int:
    config: MonitorConfig = make_parser("monitor").parse(arguments)
    ssh = parse_shell_command("--ssh", config.ssh)
    hosts = [host.strip() for host in config.hosts.split(",") if host.strip()]
    if (config.hosts and not hosts) or any(host.startswith("-") for host in hosts):
        raise UsageError(code="hosts-not-names", value=config.hosts)
    monitor = None if hosts else NodeUsageSampler()

    def look() -> list[NodeUsage]:
        if monitor is not None:
            time.sleep(EVERY_SECONDS)
            return [monitor.sample()]
        with ThreadPoolExecutor(len(hosts)) as pool:
            return [*pool.map(lambda host: _query_host(host, ssh, config.python), hosts)]

    machines = look()
    try:
        if config.json:
            print_json(machines)
        elif config.once or not sys.stdout.isatty():
            table_console().print(_page(machines))
        else:
            with Live(_page(machines), console=Console(highlight=False, emoji=False), auto_refresh=False) as live:
                while True:
                    live.update(_page(look()), refresh=True)
    except KeyboardInterrupt:
        return ExitCode.DONE
    return ExitCode.FAILED if any(machine.failure for machine in machines) else ExitCode.DONE


def _query_host(host: str, ssh: Sequence[str], python: str) -> NodeUsage:
    argv = ssh_argv(ssh, host, shlex.join((python, "-P", "-m", "paceline", "monitor", "--json", "--once")))
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=SSH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return NodeUsage(host, failure=f"does not answer within {SSH_SECONDS:g} s")
    except OSError as error:
        return NodeUsage(host, failure=f"{ssh[0]} cannot be started: {error.strerror}")
    try:
        (machine,) = msgspec.json.decode(done.stdout, type=tuple[NodeUsage, ...])
    except (msgspec.MsgspecError, ValueError):
        failure = done.stderr.decode(errors="replace").strip() or "paceline monitor printed no JSON there"
        return NodeUsage(host, failure=shorten(failure, 300))
    return msgspec.structs.replace(machine, name=host)


def _page(machines: Sequence[NodeUsage]) -> Group:
    return Group(*(part for machine in machines for part in _machine_parts(machine)))


def _machine_parts(machine: NodeUsage) -> Sequence[Text | Table]:
    head = Text(shorten(machine.name, 40), "bold")
    if (use := machine.use) is None:
        return [head.append(f"  {shorten(machine.failure, 300)}", "red")]
    head.append(
        f"  {use.cores_busy:.1f} of {use.cores} cores  {format_size(use.memory_bytes)} of "
        f"{format_size(use.memory_total_bytes)}  out {format_size(use.sent_bytes)}/s  in "
        f"{format_size(use.received_bytes)}/s",
        "not bold",
    )
    gpus: list[Text] = []
    for gpu in use.gpus:
        busy = "" if gpu.busy is None else f"{gpu.busy:.0%}"
        gpus.append(Text.assemble(f"  GPU {gpu.index} {shorten(gpu.name, 30)}  {busy}  ", format_gpu_use(gpu)))
    columns = ("pid", "user", "cores", "memory", "GPU", "run", "program")
    table = Table(*columns, box=None, padding=(0, 1), header_style="dim")
    for process in machine.processes:
        gpu = format_size(process.gpu_bytes) if process.gpu_bytes else ""
        use_cells = (f"{process.cores:.1f}", format_size(process.memory_bytes), gpu)
        cells = (str(process.pid), process.user, *use_cells, process.run, process.program)
        table.add_row(*(Text(shorten(cell, 60)) for cell in cells))
    return [head, *gpus, *([table] if machine.processes else []), Text()]
