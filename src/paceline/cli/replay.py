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
from paceline.config.settings import (
    LaunchConfig,
    NetworkConfig,
    TrainConfig,
    check_values,
    config_to_record,
    load,
    task_options,
)
from paceline.errors import ExitCode, UsageError
from paceline.lab.replay import Request, print_replay, read_log
from paceline.rank.environment import rank_counts
from paceline.runs.folder import CONFIG
from paceline.runs.owners import check_owned_by_us
from paceline.runs.reading import decode_if_readable, is_file
from paceline.runs.summary import read_summary
from paceline.tasks.registry import check_optimizer, check_task, is_session_script


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
    device: Literal["auto", "cpu", "cuda", "xpu"] | None = None
    """device (default: as in the run)"""
    json: Path | None = None
    """also write the result to this file"""
    trust: bool = False
    """use a run folder that another user owns or could have written"""


def main(arguments: Sequence[str]) -> int:
    """Run `paceline replay ARGUMENTS`."""
    from paceline.cli.run_state import find_run

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
    run_dir = find_run(config.run)
    if not config.trust:
        check_owned_by_us(run_dir)
    summary = read_summary(run_dir)
    logged = read_log(run_dir, config.step, ended=summary is not None and summary.exit == ExitCode.DONE)
    environment: dict[str, Any] = decode_if_readable(run_dir / "environment.json", dict[str, Any]) or {}
    trained = _settings(run_dir, logged.attempt, config, environment)
    _check_code(trained, config, run_dir, arguments[separator + 1 :])

    from paceline.rank.imports import TRAINING_MODULES, import_without_gc

    import_without_gc(TRAINING_MODULES)  # the first import of torch
    from paceline.lab.ranks.replay import Source, replay_script, replay_task

    source = Source(run_dir, trained, logged, environment, config.trust)
    try:
        if config.script is None:
            result = replay_task(source, request)
        else:
            result = replay_script(source, request, config.script, arguments[separator + 1 :])
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


def _settings(run_dir: Path, attempt: int, config: ReplayConfig, environment: dict[str, Any]) -> TrainConfig:
    """The settings of an attempt of the run, for one process.

    Raises:
        UsageError: several processes are necessary to repeat its steps.
    """
    paths = (run_dir / f"attempt-{attempt}" / CONFIG, run_dir / CONFIG)
    path = next((path for path in paths if is_file(path)), paths[-1])
    trained = config_to_record(load(path, must_own=not config.trust))
    if trained.network != NetworkConfig():
        raise UsageError(code="replay-slow-network")
    launch, compute = trained.launch, trained.compute
    threads = launch.threads_per_rank or environment.get("threads_per_rank")
    launch = LaunchConfig(device=config.device or launch.device, threads_per_rank=threads, mesh=launch.mesh)
    if config.find_nonfinite:  # hooks of modules do not run in compiled code
        compute = replace(compute, compile=False, cuda_graphs=False)
    trained = replace(trained, launch=launch, compute=replace(compute, peak_tflops=0.0))
    check_values(replace(trained, launch=replace(launch, mesh=None)))
    return trained


def _check_code(trained: TrainConfig, config: ReplayConfig, run_dir: Path, arguments: Sequence[str]) -> None:
    """Raise UsageError if the code of the run does not exist, or `config` names different code."""
    task = str(trained.task)
    if not is_session_script(task):
        if config.script is not None or arguments:
            raise UsageError(code="replay-script-of-task", task=task)
        check_task(task, task_options(trained))
        check_optimizer(trained.optimizer.optimizer)
        return
    if config.script is None:
        raise UsageError(code="replay-needs-script", script=task, run_dir=run_dir, step=config.step)
    if not config.script.is_file():
        raise UsageError(code="script-not-found", value=str(config.script), folder=str(Path.cwd()), hint="")
    if config.script.name != task:
        raise UsageError(code="replay-other-script", value=config.script.name, script=task, run_dir=run_dir)
