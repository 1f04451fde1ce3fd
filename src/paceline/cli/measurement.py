"""Common parts of `compare` and `scale`: the options of a measurement, the measured training, and the output."""

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from paceline.cli.options import build_settings, check_out_file, check_positive, print_json, write_json
from paceline.config.settings import TrainConfig, absolute_task, check_values, dump, load, task_options
from paceline.errors import UsageError, plural
from paceline.lab.measurement import INSPECTED_STEPS
from paceline.lab.rounds import CandidateGroup, MeasuredRounds, measure_rounds
from paceline.runs.reading import real_path
from paceline.tasks.registry import check_optimizer, check_task


@dataclass(frozen=True)
class MeasurementConfig:
    """Measurement and settings of the training."""

    steps: int = 30
    """steps of each measurement"""
    warmup: int = 5
    """steps before each measurement"""
    rounds: int = 3
    """rounds: each round measures all candidates, one after the other"""
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
    task_arg: tuple[str, ...] = ()
    """NAME=VALUE, an argument of the task function. Repeatable"""
    out: Path | None = None
    """file for all results, as JSON"""
    json: bool = False
    """print JSON instead of tables"""


def check_measurement(how: MeasurementConfig) -> None:
    check_positive(how, "steps", "rounds", "threads_per_rank")
    if how.warmup < INSPECTED_STEPS:
        raise UsageError(code="warmup-too-short", least=INSPECTED_STEPS, value=how.warmup)
    check_out_file("--out", how.out)


def train_config(task: str, how: MeasurementConfig, *, num_workers: int | None = None) -> TrainConfig:
    """The settings of the measured training: the options, otherwise --config, otherwise the defaults."""
    default = load(real_path(how.config), must_own=True) if how.config else TrainConfig()
    values = {
        "launch.device": how.device, "launch.backend": how.backend, "compute.precision": how.precision,
        "optimizer.optimizer": absolute_task(how.optimizer or default.optimizer.optimizer),
        "data.data_dir": how.data_dir, "model.stem": how.stem, "data.num_workers": num_workers,
        "task": absolute_task(task), "task_arg": [*how.task_arg],
    }  # fmt: skip
    values = {dest: value for dest, value in values.items() if value is not None} | {"strategy": None}
    config: TrainConfig = build_settings(TrainConfig, values, default)
    check_values(config)
    check_task(config.task, task_options(config))
    check_optimizer(config.optimizer.optimizer)
    return config


@contextmanager
def measure_groups(
    groups: Sequence[CandidateGroup], settings: TrainConfig, how: MeasurementConfig, *, memory: bool
) -> Generator[tuple[MeasuredRounds, Path]]:
    """Yields the measurements, and the folder of the event files, which is deleted at the end of the context."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", ignore_cleanup_errors=True) as folder:
        root = Path(folder).resolve()
        rounds = measure_rounds(
            groups, dump(settings), root, rounds=how.rounds, warmup=how.warmup, steps=how.steps, memory=memory
        )
        yield rounds, root


def core_sharing_text(ranks: int, threads: int, cores: int) -> str:
    """The number of threads and cores, as text; empty if each thread has a core."""
    if ranks * threads <= cores:
        return ""
    return f"{ranks} ranks x {plural(threads, 'thread')} = {ranks * threads} threads on {plural(cores, 'core')}"


def publish(results: msgspec.Struct, how: MeasurementConfig, print_tables: Callable[[], None]) -> None:
    if how.out:
        write_json(how.out, results)
    if how.json:
        print_json(results)
    else:
        print_tables()
