"""Shared by `compare` and `scale`: the flags of a measurement, the training that it measures, where its results go."""

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from paceline.bench.rounds import MeasuredRounds, ProcessSet, measure_rounds
from paceline.bench.spec import LOOKED_AT
from paceline.cli.options import check_out_file, check_positive, print_json, write_json
from paceline.config import settings as configuration
from paceline.config.settings import TrainConfig, absolute_task, check_values, task_options
from paceline.disk.reading import real_path
from paceline.errors import UsageError, plural
from paceline.tasks import check_optimizer, check_task


@dataclass(frozen=True)
class Measuring:
    """Measurement and settings of the training."""

    steps: int = 30
    """steps of each measurement"""
    warmup: int = 5
    """steps before each measurement"""
    rounds: int = 3
    """rounds: everything is measured N times, in turn"""
    threads_per_rank: int | None = None
    """CPU threads of each rank (default: cores / most ranks; exact and zero: 1)"""
    config: Path | None = None
    """config.toml with all other settings of the training"""
    device: Literal["auto", "cpu", "cuda", "xpu"] | None = None
    """device, as for train"""
    backend: Literal["auto", "nccl", "xccl", "gloo", "mpi"] | None = None
    """backend, as for train; with gloo several processes can use one GPU"""
    optimizer: str | None = None
    """optimizer, as for train"""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "auto"] | None = None
    """forward/backward precision"""
    data_dir: Path | None = None
    """folder of IDX files (default: the packaged MNIST)"""
    stem: Literal["imagenet", "small"] | None = None
    """first layers of ResNet18"""
    set: tuple[str, ...] = ()
    """NAME=VALUE, an argument of the task function. Repeatable"""
    out: Path | None = None
    """file for all results, as JSON"""
    json: bool = False
    """print JSON instead of tables"""


def check_measuring(how: Measuring) -> None:
    """Refuse what has no meaning, before hours of measuring.

    Raises:
        UsageError: naming the flag, and what it must be.
    """
    check_positive(how, "steps", "rounds", "threads_per_rank")
    if how.warmup < LOOKED_AT:
        raise UsageError(code="warmup-too-short", least=LOOKED_AT, value=how.warmup)
    check_out_file("--out", how.out)


def settings_of(task: str, how: Measuring, *, num_workers: int | None = None) -> TrainConfig:
    """The training to be measured: what flags say, over --config, over the defaults.

    Raises:
        UsageError: for a wrong file, value or task.
    """
    flags = {
        "launch.device": how.device, "launch.backend": how.backend, "compute.precision": how.precision,
        "optimizer.optimizer": how.optimizer, "data.data_dir": how.data_dir, "model.stem": how.stem,
        "data.num_workers": num_workers,
    }  # fmt: skip
    config = configuration.load(real_path(how.config), ours=True) if how.config else TrainConfig()
    for name, value in flags.items():
        section, _, key = name.partition(".")
        if value is not None:
            config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    task = absolute_task(task)
    optimizer = replace(config.optimizer, optimizer=absolute_task(config.optimizer.optimizer))
    config = replace(config, task=task, optimizer=optimizer, set=(*config.set, *how.set), strategy=None)
    check_values(config)
    check_task(task, task_options(config))
    check_optimizer(config.optimizer.optimizer)
    return config


@contextmanager
def measured(
    groups: Sequence[ProcessSet], settings: TrainConfig, how: Measuring, *, memory: bool
) -> Generator[tuple[MeasuredRounds, Path]]:
    """Measure all groups in rounds: what was found, and the folder of the events, which is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", ignore_cleanup_errors=True) as folder:
        root = Path(folder).resolve()
        found = measure_rounds(
            groups, configuration.dump(settings), root, rounds=how.rounds, warmup=how.warmup, steps=how.steps,
            memory=memory,
        )  # fmt: skip
        yield found, root


def crowd(ranks: int, threads: int, cores: int) -> str:
    """How many threads share how many cores, in words; empty where each has one of its own."""
    if ranks * threads <= cores:
        return ""
    each, there = plural(threads, "thread"), plural(cores, "core")
    return f"{ranks} ranks x {each} = {ranks * threads} threads on {there}"


def publish(found: msgspec.Struct, how: Measuring, print_tables: Callable[[], None]) -> None:
    """Write what was found to --out, and print it as --json says: as JSON, or by `print_tables`."""
    if how.out:
        write_json(how.out, found)
    if how.json:
        print_json(found)
    else:
        print_tables()
