"""`torchrun -m paceline watchover SCRIPT`: the hang guard where another launcher starts the ranks, and has to."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from paceline.contract.birth import BOOTSTRAP, WorkerBirth
from paceline.contract.node_plan import NodePlan
from paceline.contract.windows import Windows
from paceline.errors import UsageError
from paceline.observe.folder import create_attempt_dir, open_run_dir
from paceline.observe.terminal import say
from paceline.worker.bootstrap import run_script, worker_command
from paceline.worker.foreign import COUNTS, launched
from paceline.worker.observed import begin

SWITCHES = ("--end", "--no-end", "--help", "-h")


@dataclass(frozen=True)
class WatchoverConfig:
    """Run a script as a rank that torchrun, srun or mpirun has started, under the hang guard; nothing else changes.

    torchrun --nproc-per-node 4 -m paceline watchover train.py --epochs 5
    srun python -m paceline watchover -m my_package.train --epochs 5
    """

    stall_after: str = "auto"
    """seconds without any progress on any rank until the guilty one is named; auto: learned from the run's own pace"""
    end: bool = False
    """free the ranks that only wait, and end all, once the guilty one is named: the launcher then ends the job"""
    run_dir: Path | None = None
    """folder for verdicts with all stacks (default: none; the verdict is on the screen)"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline watchover ARGUMENTS`."""
    own, words = split_script(arguments)
    config = tyro.cli(WatchoverConfig, prog="paceline watchover", args=own)
    windows = Windows.parse(config.stall_after)
    if not words:
        raise UsageError("which script? torchrun --nproc-per-node 4 -m paceline watchover [OPTIONS] SCRIPT [ARGUMENTS]")
    command = worker_command(words)
    if BOOTSTRAP not in command:
        raise UsageError(f"watchover does not see into {words[0]}: name the .py file itself, or -m and its module")
    if WorkerBirth.here() is not None:
        raise UsageError("this rank is `paceline launch`'s, which watches over it already: leave out watchover")
    if not launched(os.environ):
        say("watchover: started as a single process; nothing to watch")
    elif not windows.off:
        begin(observer_plan(config, windows, os.environ), ["--end"] if config.end else [], os.environ)
    if not sys.flags.safe_path:  # `python -m` has put the working folder there, which a script does not see
        sys.path.pop(0)
    run_script(command[command.index(BOOTSTRAP) + 1 :])


def split_script(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and the script with its own: from the first word on that is neither an option nor its value."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] not in ("-m", "--"):
        at += 1 if "=" in arguments[at] or arguments[at] in SWITCHES else 2
    own, words = list(arguments[:at]), list(arguments[at:])
    return own, words[1:] if words[:1] == ["--"] else words


def observer_plan(config: WatchoverConfig, windows: Windows, env: Mapping[str, str]) -> NodePlan:
    """What this node's observer has to know.

    Raises:
        UsageError: the launcher has not said where this rank is; the folder cannot be used.
    """
    if missing := [name for name in COUNTS if not env.get(name, "").isdecimal()]:
        raise UsageError(f"the launcher has not set {', '.join(missing)}: each rank needs {', '.join(COUNTS)}")
    rank, size, _, local_size = (int(env[name]) for name in COUNTS)  # local rank 0's: it starts the observer
    run_dir = attempt_dir = ""
    if config.run_dir is not None and rank == 0:
        folder = open_run_dir(config.run_dir, "watchover", resume=env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
        run_dir, attempt_dir = str(folder), str(create_attempt_dir(folder)[1])
    return NodePlan(
        argv=(),
        nproc=local_size,
        stall_after=windows,
        nodes=size if size > local_size else 1,  # how many there are nobody says; their numbers are below this
        node=int(env.get("GROUP_RANK") or rank),
        first_rank=rank,
        world_size=size,
        run_dir=run_dir,
        attempt_dir=attempt_dir,
        head=(env.get("MASTER_ADDR", ""),),
    )
