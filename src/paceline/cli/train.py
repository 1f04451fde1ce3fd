"""`paceline train`: check everything that can be checked without torch, then train here or start the workers.

The same command is the worker's: where a launcher's variables are set (torchrun's, or our own agent's), it is a rank.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import tyro
from msgspec.structs import replace as replace_fields

from paceline import config as configuration
from paceline.config import CliTrainConfig, TrainConfig, batch_shape, check_values, default_strategy
from paceline.errors import ExitCode, UsageError
from paceline.launch.cgroup import usable_cores
from paceline.launch.job import Job, threads_per_rank
from paceline.launch.local import local
from paceline.launch.supervise import run
from paceline.observe.events import Step, read_events
from paceline.observe.folder import create_attempt_dir, create_run_dir
from paceline.observe.summary import Summary, read_summary, write_summary
from paceline.tasks import check_task

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def main(arguments: Sequence[str]) -> int:
    """Run `paceline train ARGUMENTS`."""
    config = parse(arguments)
    if any(name in os.environ for name in LAUNCHED):
        return work(config)
    check_values(config)
    gpus = count_gpus() if config.launch.device != "cpu" else 0
    nproc = gpus or usable_cores() if config.launch.nproc == "auto" else config.launch.nproc
    check(config, nproc or 1, gpus)
    if nproc is None:
        return work(config)
    return launch(replace(config, launch=replace(config.launch, nproc=nproc)), nproc)


def parse(arguments: Sequence[str]) -> TrainConfig:
    """The configuration that flags give, over that of `--config FILE`, over the defaults.

    Raises:
        UsageError: if the file is wrong. A wrong flag ends the process with exit code 2, as every parser does.
    """
    rest, path = _take_config(list(arguments))
    default = configuration.load(path) if path else TrainConfig()
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


def check(config: TrainConfig, nproc: int, gpus: int) -> None:
    """Refuse, without torch, whatever can be known to be wrong before any process is started.

    Raises:
        UsageError: naming the setting, what is true, and what to do.
    """
    shape = batch_shape(config.data, nproc)
    check_task(config.task, configuration.task_options(config))
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


def launch(config: TrainConfig, nproc: int) -> int:
    """Make the run folder and start `nproc` workers under an agent; return the exit code."""
    task = str(config.task)
    run_dir = create_run_dir(config.run.run_dir, task)
    _, attempt_dir = create_attempt_dir(run_dir)
    settings = run_dir / "config.toml"
    settings.write_text(configuration.dump(config))
    users_threads = os.environ.get("OMP_NUM_THREADS", "")
    threads = config.launch.threads_per_rank or (int(users_threads) if users_threads.isdecimal() else 0)
    job = Job(
        argv=(sys.executable, "-m", "paceline", "train", "--config", str(settings), "--run-dir", str(run_dir)),
        nproc=nproc,
        attempt_dir=attempt_dir,
        run_id=secrets.token_hex(8),
        threads=threads or threads_per_rank(usable_cores(), nproc),
        port=config.launch.port,
    )
    code = run(local(job), attempt_dir)
    if code != ExitCode.DONE:
        try:
            write_summary(run_dir, failed_summary(run_dir, config, nproc, code))
        except OSError as error:  # the very disk, perhaps, that ended the run
            print(f"summary.json cannot be written: {error}", file=sys.stderr)
        print(f"run folder {run_dir}", file=sys.stderr)
    return code


def failed_summary(run_dir: Path, config: TrainConfig, nproc: int, code: int) -> Summary:
    """What is known of a run that ended with `code`, which counts more than what its ranks believed."""
    written = read_summary(run_dir)
    if written is not None:
        return replace_fields(written, exit=code)
    events = run_dir / "events-0.jsonl"
    steps = [event for event in read_events(events) if isinstance(event, Step)] if events.is_file() else []
    shape = batch_shape(config.data, nproc)
    return Summary(
        task=str(config.task),
        exit=code,
        strategy=default_strategy(config, nproc),
        world_size=nproc,
        virtual_ranks=shape.virtual_ranks,
        global_batch=shape.global_batch,
        steps=len(steps),
        samples_seen=sum(step.samples for step in steps),
    )


def work(config: TrainConfig) -> int:
    """Be a rank: of the world that a launcher made, or of a world of one."""
    check_values(config)
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if str(config.launch.nproc) not in ("None", "auto", local_size):
        raise UsageError(
            f"--nproc {config.launch.nproc} within a launcher that started {local_size} processes on this node: "
            "leave out --nproc, the launcher has decided"
        )
    prepared = config.run.run_dir if "PACELINE_ATTEMPT_DIR" in os.environ else None
    from paceline.train.run import train  # the first import of torch

    train(config, run_dir=prepared)
    return ExitCode.DONE
