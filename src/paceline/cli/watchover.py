"""`torchrun -m paceline watchover SCRIPT`: the hang guard for ranks that another launcher starts."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cli import make_parser
from paceline.errors import UsageError
from paceline.protocol.control import BOOTSTRAP, WorkerSpec
from paceline.protocol.job import HangTimeout, NodePlan, NodeRanks
from paceline.rank.bootstrap import attach_to_agent, run_script, worker_command
from paceline.rank.environment import RANK_VARIABLES, has_launcher_variables
from paceline.runs.console import print_to_stderr
from paceline.runs.folder import create_attempt_dir, set_up_run_dir

OPTIONS_WITHOUT_VALUE = ("-h", "--help", "--help-all", "--end", "--no-end")


@dataclass(frozen=True)
class WatchoverConfig:
    """Guard a script against hangs as a rank that torchrun, srun or mpirun started; nothing else changes."""

    hang_timeout: str = "auto"
    """seconds without progress on any rank before the report of the rank at fault; auto: adapts to the pace of the run;
    off: no guard"""
    end: bool = False
    """after the report, unblock the waiting ranks and end all; the launcher then ends the job"""
    run_dir: Path | None = None
    """folder for reports with all stacks (default: none; reports are printed)"""


def main(arguments: Sequence[str]) -> int:
    options, script = split_options_and_script(arguments)
    config: WatchoverConfig = make_parser("watchover").parse(options)
    windows = HangTimeout.parse(config.hang_timeout)
    if not script:
        raise UsageError(code="watchover-no-script")
    command = worker_command(script)
    if BOOTSTRAP not in command:
        raise UsageError(code="watchover-not-python", value=script[0])
    if WorkerSpec.from_environment() is not None:
        raise UsageError(code="watchover-of-paceline")
    if not has_launcher_variables(os.environ):
        print_to_stderr("watchover: started as a single process; nothing to watch")
    elif not windows.off:
        attach_to_agent(make_agent_plan(config, windows, os.environ), os.environ)
    if not sys.flags.safe_path:  # `python -m` has added the working folder, unlike `python script.py`
        sys.path.pop(0)
    run_script(command[command.index(BOOTSTRAP) + 1 :])


def split_options_and_script(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the script with its arguments, which begins at the first argument that is not an option."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] not in ("-m", "--"):
        at += 1 if "=" in arguments[at] or arguments[at] in OPTIONS_WITHOUT_VALUE else 2
    options, script = list(arguments[:at]), list(arguments[at:])
    return options, script[1:] if script[:1] == ["--"] else script


def make_agent_plan(config: WatchoverConfig, windows: HangTimeout, env: Mapping[str, str]) -> NodePlan:
    if missing := [name for name in RANK_VARIABLES if not env.get(name, "").isdecimal()]:
        raise UsageError(code="launcher-variables-missing", missing=[*missing], counts=[*RANK_VARIABLES])
    rank, size, _, local_size = (int(env[name]) for name in RANK_VARIABLES)  # local rank 0 starts the agent
    run_dir = attempt_dir = ""
    if config.run_dir is not None and rank == 0:
        folder = set_up_run_dir(config.run_dir, "watchover", resume=env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
        run_dir, attempt_dir = str(folder), str(create_attempt_dir(folder)[1])
    return NodePlan(
        argv=(),
        nproc=local_size,
        hang_timeout=windows,
        nodes=size if size > local_size else 1,  # an upper bound: no variable has the number of nodes
        node=int(env.get("GROUP_RANK") or rank),
        ranks=NodeRanks(first=rank, world_size=size),
        run_dir=run_dir,
        attempt_dir=attempt_dir,
        node0=(env.get("MASTER_ADDR", ""),),
        may_end=config.end,
    )
