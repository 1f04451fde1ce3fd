"""`paceline replay`: repeats one step of a run on one process, and shows its losses and gradients."""

from __future__ import annotations

import os
from bdb import BdbQuit
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.cli import command_line
from paceline.cli.options import check_out_file, check_positive, write_json
from paceline.config import settings as configuration
from paceline.errors import ExitCode, UsageError
from paceline.lab.replay import Request, Source, print_replay, read_log
from paceline.rank.environment import rank_counts
from paceline.runs.folder import CONFIG
from paceline.runs.owners import check_owned_by_us
from paceline.runs.reading import decode_if_readable, is_file
from paceline.runs.summary import read_summary
from paceline.tasks.registry import check_optimizer, check_task, is_session_script

Device = Literal["auto", "cpu", "cuda", "xpu"]


@dataclass(frozen=True)
class ReplayConfig:
    """Repeat one step of a run on one process, and show the loss of each sample and the gradients of each layer.

    It begins at the nearest checkpoint and does not change the run folder. Exit code 1 if the result differs from the
    logged one by more than expected. For a session, name the script; its arguments follow --.
    """

    run: str
    """run folder, or the beginning of its name under runs/"""
    script: Path | None = None
    """the script of a session"""
    step: int = field(kw_only=True)
    """the step to repeat, from 1"""
    without: tuple[str, ...] = ()
    """indices in the dataset of samples to leave out of the step. Repeatable"""
    find_nonfinite: bool = False
    """name the first module with an output or a gradient that is NaN or infinite"""
    pdb: bool = False
    """stop in the debugger before each forward of the step, with batch, model and optimizer"""
    check: bool = False
    """also repeat the steps up to the next checkpoint, and compare every tensor with it"""
    top: int = 10
    """number of samples to list"""
    device: Device | None = None
    """device (default: as in the run)"""
    json: Path | None = None
    """also write the result to this file"""
    trust: bool = False
    """use a run folder that another user owns or could have written"""


def main(arguments: Sequence[str]) -> int:
    separator = [*arguments, "--"].index("--")
    config: ReplayConfig = command_line("replay").parse(arguments[:separator])
    check_positive(config, "step", "top")
    check_out_file("--json", config.json)
    rank, size, *_ = rank_counts(os.environ)
    if size > 1:
        raise UsageError(code="launch-within-launcher", rank=rank, world_size=size)
    request = Request(config.step, _indices(config.without), config.find_nonfinite, config.pdb, config.check)
    if request.check and request.without:
        raise UsageError(code="replay-check-without")
    run = open_run(config.run, config.step, device=config.device, eager=config.find_nonfinite, trust=config.trust)
    check_code(run, config.script, arguments[separator + 1 :])

    from paceline.rank.imports import TRAINING_MODULES, import_without_gc

    import_without_gc(TRAINING_MODULES)  # the first import of torch
    from paceline.lab.ranks.replay import replay_script, replay_task

    try:
        if config.script is None:
            result = replay_task(run, request)
        else:
            result = replay_script(run, request, config.script, arguments[separator + 1 :])
    except BdbQuit:  # the user has ended the debugger
        return ExitCode.DONE
    if config.json:
        write_json(config.json, result)
    print_replay(result, config.top, find_nonfinite=config.find_nonfinite)
    return ExitCode.DONE if result.agrees else ExitCode.FAILED


def _indices(texts: Sequence[str]) -> frozenset[int]:
    parts = [part for text in texts for part in text.split(",")]
    if wrong := [part for part in parts if not part.strip().isdecimal()]:
        raise UsageError(code="replay-index", value=wrong[0])
    return frozenset(map(int, parts))


def open_run(run: str, step: int, *, device: Device | None, eager: bool, trust: bool) -> Source:
    """Find a run, with its settings for one process and its log of a step. `eager`: without compiled code."""
    from paceline.cli.run_state import find_run

    run_dir = find_run(run)
    if not trust:
        check_owned_by_us(run_dir)
    summary = read_summary(run_dir)
    logged = read_log(run_dir, step, ended=summary is not None and summary.exit == ExitCode.DONE)
    environment: dict[str, Any] = decode_if_readable(run_dir / "environment.json", dict[str, Any]) or {}
    paths = (run_dir / f"attempt-{logged.attempt}" / CONFIG, run_dir / CONFIG)
    path = next((path for path in paths if is_file(path)), paths[-1])
    trained = configuration.config_to_record(configuration.load(path, must_own=not trust))
    if trained.network != configuration.NetworkConfig():
        raise UsageError(code="replay-slow-network")
    launch, compute = trained.launch, trained.compute
    threads = launch.threads_per_rank or environment.get("threads_per_rank")
    launch = configuration.LaunchConfig(device=device or launch.device, threads_per_rank=threads, mesh=launch.mesh)
    if eager:  # hooks of modules do not run in compiled code
        compute = replace(compute, compile=False, cuda_graphs=False)
    trained = replace(trained, launch=launch, compute=replace(compute, peak_tflops=0.0))
    configuration.check_values(replace(trained, launch=replace(launch, mesh=None)))
    return Source(run_dir, trained, logged, environment, trust)


def check_code(run: Source, script: Path | None, arguments: Sequence[str]) -> None:
    task = str(run.config.task)
    if not is_session_script(task):
        if script is not None or arguments:
            raise UsageError(code="replay-script-of-task", task=task)
        check_task(task, configuration.task_options(run.config))
        check_optimizer(run.config.optimizer.optimizer)
        return
    if script is None:
        raise UsageError(code="replay-needs-script", script=task, run_dir=run.run_dir)
    if not script.is_file():
        raise UsageError(code="script-not-found", value=str(script), folder=str(Path.cwd()), hint="")
    if script.name != task:
        raise UsageError(code="replay-other-script", value=script.name, script=task, run_dir=run.run_dir)
