"""`paceline monitor`: what machines do now, and who does it; without any run."""

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import tyro
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.cli.flags import command_words, print_json, table_console
from paceline.errors import ExitCode, UsageError
from paceline.view.machines import MachineNow, Monitor
from paceline.view.watch_lines import gpu_words
from paceline.view.words import one_line, size_words

EVERY_SECONDS = 1.0
SSH_SECONDS = 30.0


@dataclass(frozen=True)
class MonitorConfig:
    """Show what machines do now: cores, memory, network, GPUs, and the processes that use them. Ctrl-C leaves it."""

    hosts: str = ""
    """machines to look at over ssh, separated by commas (default: this one); paceline must be there at the same path"""
    once: bool = False
    """look once, and end; so it does where there is no terminal"""
    json: bool = False
    """print JSON, a list of machines, once"""
    ssh: str = "ssh"
    """the ssh command to reach them"""
    python: str = sys.executable
    """the Python there"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline monitor ARGUMENTS`."""
    config = tyro.cli(MonitorConfig, prog="paceline monitor", args=arguments)
    ssh = command_words("--ssh", config.ssh)
    hosts = [host.strip() for host in config.hosts.split(",") if host.strip()]
    if (config.hosts and not hosts) or any(host.startswith("-") for host in hosts):
        raise UsageError(f"--hosts must be names separated by commas, like n1,n2; got {config.hosts!r}")
    monitor = None if hosts else Monitor()

    def look() -> list[MachineNow]:
        if monitor is not None:
            time.sleep(EVERY_SECONDS)
            return [monitor.look()]
        with ThreadPoolExecutor(len(hosts)) as pool:
            return [*pool.map(lambda host: _there(host, ssh, config.python), hosts)]

    found = look()
    try:
        if config.json:
            print_json(found)
        elif config.once or not sys.stdout.isatty():
            table_console().print(_page(found))
        else:
            with Live(_page(found), console=Console(highlight=False, emoji=False), auto_refresh=False) as live:
                while True:
                    live.update(_page(look()), refresh=True)
    except KeyboardInterrupt:
        return ExitCode.DONE
    return ExitCode.FAILED if any(one.failure for one in found) else ExitCode.DONE


def _there(host: str, ssh: Sequence[str], python: str) -> MachineNow:
    """Another machine, as the same command sees it there."""
    name, _, port = host.partition(":")
    where = ("-p", port, "--", name) if port.isdecimal() else ("--", host)
    command = shlex.join((python, "-P", "-m", "paceline", "monitor", "--json", "--once"))
    argv = (*ssh, "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *where, command)
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=SSH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return MachineNow(host, failure=f"does not answer within {SSH_SECONDS:g} s")
    except OSError as error:
        return MachineNow(host, failure=f"{ssh[0]} cannot be started: {error.strerror}")
    try:
        (one,) = msgspec.json.decode(done.stdout, type=tuple[MachineNow, ...])
    except (msgspec.MsgspecError, ValueError):
        words = done.stderr.decode(errors="replace").strip() or "it has not said what it does"
        return MachineNow(host, failure=one_line(words, 300))
    return msgspec.structs.replace(one, name=host)


def _page(found: Sequence[MachineNow]) -> Group:
    return Group(*(part for one in found for part in _machine(one)))


def _machine(one: MachineNow) -> Sequence[Text | Table]:
    head = Text(one_line(one.name, 40), "bold")
    if (use := one.use) is None:
        return [head.append(f"  {one_line(one.failure, 300)}", "red")]
    head.append(
        f"  {use.cores_busy:.1f} of {use.cores} cores  {size_words(use.memory_bytes)} of "
        f"{size_words(use.memory_total_bytes)}  out {size_words(use.sent_bytes)}/s  in "
        f"{size_words(use.received_bytes)}/s",
        "not bold",
    )
    gpus = [
        Text.assemble(
            f"  GPU {gpu.index} {one_line(gpu.name, 30)}  {'' if gpu.busy is None else f'{gpu.busy:.0%}'}  ",
            gpu_words(gpu),
        )
        for gpu in use.gpus
    ]
    table = Table(
        "pid", "user", "cores", "memory", "GPU", "run", "program", box=None, padding=(0, 1), header_style="dim"
    )
    for it in one.processes:
        cells = (str(it.pid), it.user, f"{it.cores:.1f}", size_words(it.memory_bytes), size_words(it.gpu_bytes or 0))
        cells = (*cells[:4], cells[4] if it.gpu_bytes else "", it.run, it.words)
        table.add_row(*(Text(one_line(cell, 60)) for cell in cells))
    return [head, *gpus, *([table] if one.processes else []), Text()]
