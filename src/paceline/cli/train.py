"""`paceline train`: check everything that can be checked without torch, then train here or start the workers.

The same command is the worker's: where a launcher's variables are set (torchrun's, or our own agent's), it is a rank.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import get_args

import tyro
from msgspec.structs import replace as replace_fields

from paceline import config as configuration
from paceline.checkpoint.store import Checkpoints, Damaged
from paceline.config import EXACT, CliTrainConfig, TrainConfig, batch_shape, check_values, default_strategy
from paceline.errors import ExitCode, UsageError
from paceline.launch.cgroup import usable_cores
from paceline.launch.job import Job, threads_per_rank
from paceline.launch.local import local
from paceline.launch.supervise import run
from paceline.observe.events import Step, read_events
from paceline.observe.folder import (
    CHECKPOINTS,
    CONFIG,
    check_is_run,
    check_not_finished,
    create_attempt_dir,
    lock_run_dir,
    move_aside,
    open_run_dir,
    write_settings,
)
from paceline.observe.summary import Summary, read_summary, write_summary
from paceline.tasks import check_task
from paceline.train.definition import allowed_changes, check_same, settings

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def main(arguments: Sequence[str]) -> int:
    """Run `paceline train ARGUMENTS`."""
    config = parse(arguments)
    if any(name in os.environ for name in LAUNCHED):
        return start_here(config)[1]
    check_values(config)
    gpus = count_gpus() if config.launch.device != "cpu" else 0
    nproc = gpus or usable_cores() if config.launch.nproc == "auto" else config.launch.nproc
    check(config, nproc or 1, gpus)
    start = start_here if nproc is None else launch
    config = replace(config, launch=replace(config.launch, nproc=nproc))
    run_dir, code = start(config)
    if code != ExitCode.SAVED or config.checkpoint.rehearse_preemption is None:
        return code
    print("rehearsal: stopped in good order; now it is resumed", file=sys.stderr)
    again = replace(config.checkpoint, resume="auto", fresh=False, rehearse_preemption=None)
    return start(replace(config, checkpoint=again, run=replace(config.run, run_dir=run_dir)))[1]


def parse(arguments: Sequence[str]) -> TrainConfig:
    """The configuration that flags give, over that of `--config FILE`, over the defaults.

    Raises:
        UsageError: if the file is wrong. A wrong flag ends the process with exit code 2, as every parser does.
    """
    rest, path = _take_config(list(arguments))
    resumed = None if path else _resumed_config(rest)
    path = path or resumed
    default = configuration.load(path) if path else TrainConfig()
    if resumed and default.strategy == "single":  # it goes on among several as the default for several
        default = replace(default, strategy=None)
    return tyro.cli(
        CliTrainConfig,
        prog="paceline train",
        args=rest,
        default=default,
        description=_DESCRIPTION,
        console_outputs=os.environ.get("RANK", "0") == "0",  # under torchrun every rank finds the same mistake
    )


_DESCRIPTION = "Train a model on one process or on many. --config FILE reads settings from TOML; flags win over it."


def _take_config(arguments: list[str]) -> tuple[list[str], Path | None]:
    for index, argument in enumerate(arguments):
        if argument.startswith("--config="):
            return arguments[:index] + arguments[index + 1 :], Path(argument.removeprefix("--config="))
        if argument == "--config":
            if index + 1 == len(arguments):
                raise UsageError("--config needs a file, e.g. the config.toml of an earlier run")
            return arguments[:index] + arguments[index + 2 :], Path(arguments[index + 1])
    return arguments, None


def _resumed_config(arguments: Sequence[str]) -> Path | None:
    """The settings of the run to be resumed: what no flag says stays as it was."""
    folder = _value_of("--run-dir", arguments)
    if folder is None or _value_of("--resume", arguments) != "auto":
        return None
    path = Path(folder) / CONFIG
    return path if path.is_file() else None


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    for argument, following in zip_longest(arguments, arguments[1:]):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == flag:  # the parser takes both
            return value if equals else following
    return None


def check(config: TrainConfig, nproc: int, gpus: int) -> None:
    """Refuse, without torch, whatever can be known to be wrong before any process is started.

    Raises:
        UsageError: naming the setting, what is true, and what to do.
    """
    shape = batch_shape(config.data, nproc)
    check_task(config.task, configuration.task_options(config))
    check_checkpoints(config, nproc)
    if config.strategy in EXACT and config.model.batchnorm == "sync":
        raise UsageError(
            f"--strategy {config.strategy} gives the same bits at every world size; --batchnorm sync adds up its "
            "statistics over processes and cannot. Use --batchnorm local (statistics of each virtual rank)"
        )
    if config.strategy in ("single", "dp") and nproc > 1:
        others = [s for s in get_args(configuration.StrategyName) if s not in ("single", "dp")]
        raise UsageError(
            f"strategy {config.strategy!r} lives in one process, --nproc asks for {nproc}. "
            f"For several processes use {', '.join(others)}."
        )
    if config.launch.device == "cuda" and gpus == 0:
        raise UsageError("--device cuda: this machine has no NVIDIA GPU (counted by NVML). Use --device cpu")
    if gpus and nproc > gpus:
        raise UsageError(
            f"--nproc {nproc} needs {nproc} GPUs, this machine has {gpus} (counted by NVML). "
            f"Use --nproc {gpus}, or --device cpu"
        )
    if nproc > shape.virtual_ranks:
        raise UsageError(
            f"--nproc {nproc} is more than --virtual-ranks {shape.virtual_ranks}: some processes would have nothing "
            f"to do. Use --nproc {shape.virtual_ranks} or fewer"
        )


def check_checkpoints(config: TrainConfig, nproc: int) -> None:
    """Refuse what contradicts itself about checkpoints, resuming and restarting.

    Raises:
        UsageError: naming the setting, what is true, and what to do.
    """
    c, launch = config.checkpoint, config.launch
    allowed = allowed_changes(c.allow_change)
    if c.resume == "auto" and config.run.run_dir is None:
        raise UsageError("--resume auto needs --run-dir: the folder of the run to go on with (or a new one, to begin)")
    if c.resume == "no" and (c.fresh or allowed):
        raise UsageError(f"{'--fresh' if c.fresh else '--allow-change'} has a meaning only with --resume auto")
    if launch.min_nproc is not None and launch.min_nproc > nproc:
        raise UsageError(f"--min-nproc {launch.min_nproc} is more than --nproc {nproc}")
    if (launch.max_restarts or launch.min_nproc) and launch.nproc is None:
        raise UsageError("--max-restarts and --min-nproc need --nproc: workers are restarted by their agent")
    if c.resume == "auto" and not c.fresh:
        check_resumable(config, nproc)


def check_resumable(config: TrainConfig, nproc: int) -> None:
    """Compare the settings with those of the newest checkpoint that can be read; its bytes are the workers' business.

    Raises:
        UsageError: naming each difference.
    """
    assert config.run.run_dir is not None
    run_dir = config.run.run_dir.resolve()
    check_is_run(run_dir)
    checkpoints = Checkpoints(run_dir / CHECKPOINTS)
    if not checkpoints.entries():
        check_not_finished(run_dir)
    for _, path in checkpoints.entries():
        try:
            saved = checkpoints.check(path, files=()).definition
        except Damaged:
            continue
        now = settings(configuration.resolved(config, nproc))
        check_same(saved, now, allowed_changes(config.checkpoint.allow_change), str(path))
        return


def count_gpus() -> int:
    """NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible; 0 without a driver."""
    import pynvml  # not needed for --device cpu

    try:
        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len([v for v in visible.split(",") if v.strip() not in ("", "-1")]))


def launch(config: TrainConfig) -> tuple[Path, int]:
    """Make the run folder and start `--nproc` workers under an agent; return the folder and the exit code."""
    nproc, task, c = int(config.launch.nproc or 1), str(config.task), config.checkpoint
    run_dir = open_run_dir(config.run.run_dir, task, resume=c.resume == "auto")
    lock = lock_run_dir(run_dir)
    try:
        if c.fresh:
            move_aside(run_dir)
        config = configuration.resolved(config, nproc)
        config = replace(config, run=replace(config.run, run_dir=run_dir))
        attempt, attempt_dir = create_attempt_dir(run_dir)
        write_settings(attempt_dir, configuration.dump(config))
        if not (run_dir / CONFIG).exists():
            write_settings(run_dir, configuration.dump(configuration.repeatable(config)))
        code = run(local(job_of(config, nproc, attempt_dir)), attempt_dir, keep_open=[lock])
    finally:
        os.close(lock)
    if code == ExitCode.USAGE and attempt > 1:
        return run_dir, code  # refused: nothing is written over
    if code not in (ExitCode.DONE, ExitCode.SAVED):
        try:
            write_summary(run_dir, failed_summary(run_dir, config, nproc, code))
        except OSError as error:  # the very disk, perhaps, that ended the run
            print(f"summary.json cannot be written: {error}", file=sys.stderr)
        print(f"run folder {run_dir}", file=sys.stderr)
    return run_dir, code


def job_of(config: TrainConfig, nproc: int, attempt_dir: Path) -> Job:
    """The workers of a training: each runs this very command, with the settings that the attempt's folder holds."""
    users_threads = os.environ.get("OMP_NUM_THREADS", "")
    threads = config.launch.threads_per_rank or (int(users_threads) if users_threads.isdecimal() else 0)
    settings_file = str(attempt_dir / CONFIG)
    return Job(
        argv=(sys.executable, "-m", "paceline", "train", "--config", settings_file),
        nproc=nproc,
        attempt_dir=attempt_dir,
        run_id=secrets.token_hex(8),
        threads=threads or threads_per_rank(usable_cores(), nproc),
        port=config.launch.port,
        max_restarts=config.launch.max_restarts,
        min_nproc=config.launch.min_nproc or 0,
        stop_grace_seconds=config.launch.stop_grace,
    )


def failed_summary(run_dir: Path, config: TrainConfig, nproc: int, code: int) -> Summary:
    """What is known of a run that ended with `code`, which counts more than what its ranks believed."""
    written = read_summary(run_dir)
    if written is not None:
        return replace_fields(written, exit=code)
    events = run_dir / "events-0.jsonl"
    logged = read_events(events) if events.is_file() else ()
    steps = {event.step: event.samples for event in logged if isinstance(event, Step)}  # done again counts once
    shape = batch_shape(config.data, nproc)
    return Summary(
        task=str(config.task),
        exit=code,
        strategy=default_strategy(config, nproc),
        world_size=nproc,
        virtual_ranks=shape.virtual_ranks,
        global_batch=shape.global_batch,
        steps=max(steps, default=0),
        samples_seen=sum(steps.values()),
    )


def start_here(config: TrainConfig) -> tuple[Path, int]:
    """Be a rank: of the world that a launcher made, or of a world of one. Returns the run folder and the exit code."""
    check_values(config)
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "1")
    prepared = "PACELINE_ATTEMPT_DIR" in os.environ  # our own agent: after a restart it may have started fewer
    if not prepared and str(config.launch.nproc) not in ("None", "auto", local_size):
        raise UsageError(
            f"--nproc {config.launch.nproc} within a launcher that started {local_size} processes on this node: "
            "leave out --nproc, the launcher has decided"
        )
    from paceline.train.run import train  # the first import of torch

    ended = train(config, run_dir=config.run.run_dir if prepared else None)
    return ended.folder, ended.code
