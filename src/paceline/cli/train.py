"""`paceline train`: checks all that can be checked without torch, then trains here or starts the workers.

The same command is the worker's: where a launcher's variables are set (torchrun's, or our own agent's), it is a rank.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replace_fields

from paceline import config as configuration
from paceline.cli.commands import command_line
from paceline.cli.elsewhere import placed_job, workers
from paceline.cli.flags import check_gpus, nproc_auto, usable_gpus
from paceline.cli.options import built
from paceline.cli.train_checks import check_guard, check_training
from paceline.cli.train_start import launch, launch_elsewhere, show_plan
from paceline.config import ClusterConfig, TrainConfig, check_values
from paceline.disk.reading import real_path
from paceline.errors import ExitCode, UsageError, flag
from paceline.ladder import DEFAULT_ALONE, LADDER
from paceline.observe.folder import CONFIG
from paceline.observe.terminal import say
from paceline.protocol.control import WorkerBirth
from paceline.protocol.job import JobSpec
from paceline.rank.environment import check_shape, launched
from paceline.rank.imports import TRAINING, import_all
from paceline.tasks.settings import told
from paceline.torch_version import untested_torch


def main(arguments: Sequence[str]) -> int:
    """Run `paceline train ARGUMENTS`."""
    config = parse(arguments)
    if os.environ.get("RANK", "0") == "0":
        for line in untested_torch():
            say(line)
    if launched(os.environ):
        check_guard(config)
        return start_here(config)[1]
    given = config.launch.nproc if isinstance(config.launch.nproc, int) else None
    cluster = config.cluster
    if cluster.on == "slurm" and config.launch.device == "cuda" and cluster.gpus_per_node is None:
        cluster = replace(cluster, gpus_per_node=given or 1)
    job = replace_fields(placed_job(cluster, given), stall_after=check_guard(config))
    if cluster.on != "local":
        return _elsewhere(config, job)
    gpus = usable_gpus(config.launch.device)
    nproc = nproc_auto(config.launch.device) if config.launch.nproc == "auto" else config.launch.nproc
    check_training(config, nproc or 1)
    check_gpus(f"--nproc {nproc or 1}", nproc or 1, gpus, config.launch.backend)
    config, job = replace(config, launch=replace(config.launch, nproc=nproc)), replace_fields(job, nproc=nproc or 1)
    if nproc is None and config.cluster != ClusterConfig():
        raise UsageError(code="option-needs-nproc")
    if nproc is None and (gpus or 0) > 1 and not (config.strategy and LADDER[config.strategy].several_gpus):
        say(f"training on 1 of {gpus} GPUs. To use all of them, add --nproc auto")
    if config.cluster.dry_run:
        return show_plan(config, job)
    if config.cluster.detach:
        return _elsewhere(config, job)
    start = start_here if nproc is None else partial(launch, job)
    run_dir, code = start(config)
    if code != ExitCode.SAVED or config.checkpoint.rehearse_preemption is None:
        return code
    print("rehearsal: stopped in good order; now it is resumed", file=sys.stderr)
    again = replace(config.checkpoint, resume="auto", fresh=False, rehearse_preemption=None)
    return start(replace(config, checkpoint=again, run=replace(config.run, run_dir=run_dir)))[1]


def _elsewhere(config: TrainConfig, job: JobSpec) -> int:
    """On other machines, or later: those check what only they know."""
    on, size = config.cluster.on, workers(job)
    if config.launch.nproc == "auto":
        raise UsageError(code="train-nproc-of-this-machine", launcher=on)
    if config.checkpoint.rehearse_preemption is not None:
        raise UsageError(code="rehearsal-elsewhere")
    if config.launch.min_nproc is not None and on != "local":
        raise UsageError(code="min-nproc-elsewhere")
    config = replace(config, launch=replace(config.launch, nproc=job.nproc))
    check_training(config, size)
    if job.min_nodes < job.nodes and config.checkpoint.checkpoint_every is None:
        raise UsageError(code="nodes-without-checkpoints", value=config.cluster.nodes)
    return show_plan(config, job) if config.cluster.dry_run else launch_elsewhere(config, job, size)


def parse(arguments: Sequence[str]) -> TrainConfig:
    """The configuration that flags give, over that of `--config FILE`, over the defaults.

    Raises:
        UsageError: if the file or a value is wrong.
    """
    line = command_line("train")
    try:
        given = line.given(arguments)
    except SystemExit as end:
        if end.code == 0 and ":" in arguments[0]:  # --help, asked with a task
            print(told(arguments[0]))
        raise
    path = given.pop("config", None)
    resumed = None if path else _resumed_config(given)
    path = real_path(path) if path else resumed
    default = configuration.load(path, ours=not given.get("run.trust", False)) if path else TrainConfig()
    if resumed and default.strategy == DEFAULT_ALONE:  # with several processes it continues with their default
        default = replace(default, strategy=None)
    config = built(TrainConfig, given, default)
    try:
        check_values(config)
    except UsageError as error:
        typed = {dest.rpartition(".")[2] for dest in given}
        error.write = lambda name, value: (flag if not path or name in typed else configuration.key)(name, value)
        error.before = f"{path}: " if path and error.setting not in typed else ""
        raise
    return config


def _resumed_config(given: Mapping[str, Any]) -> Path | None:
    """The settings of the run to be resumed: what no flag changes stays as it was."""
    folder = given.get("run.run_dir")
    if folder is None or given.get("checkpoint.resume") != "auto":
        return None
    path = real_path(folder) / CONFIG  # through no link in the folder itself
    return path if os.path.lexists(path) else None


def start_here(config: TrainConfig) -> tuple[Path, int]:
    """Be a rank: of the world that a launcher made, or of a world of one. Returns the run folder and the exit code."""
    env = os.environ
    asked = config.launch.nproc
    if WorkerBirth.here() is None:  # our own agents need no checks, and after a restart there may be fewer of us
        if config.cluster.on != "local" or config.cluster.dry_run:
            raise UsageError(
                code="train-within-launcher", launcher=config.cluster.on, rank=env.get("RANK"),
                world_size=env.get("WORLD_SIZE"),
            )  # fmt: skip
        if config.cluster.nodes and isinstance(asked, int):
            check_shape(env, int(config.cluster.nodes.rpartition(":")[2]), asked)
        local_size = env.get("LOCAL_WORLD_SIZE", "1")
        if str(asked) not in ("None", "auto", local_size):
            raise UsageError(code="nproc-within-launcher", value=asked, local_size=local_size)
    import_all(TRAINING)  # the first import of torch
    from paceline.train.run import train

    ended = train(config)
    return ended.folder, ended.code
