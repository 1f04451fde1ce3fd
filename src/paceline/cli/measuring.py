"""What `compare` and `scale` share: the flags of a measurement, the training that it measures, where its results go."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro

from paceline import config as configuration
from paceline.config import TrainConfig, absolute_task, check_values, task_options
from paceline.disk.reading import real_path
from paceline.errors import UsageError
from paceline.tasks import check_task


@dataclass(frozen=True)
class Measuring:
    """How often is measured, with which settings of the training, and where the results go."""

    steps: int = 30
    """of each measurement"""
    warmup: int = 5
    """steps before it, which are not counted"""
    rounds: int = 3
    """how often everything is measured, in turn"""
    threads_per_rank: int | None = None
    """CPU threads of each rank (default: cores / most ranks; exact and zero: 1)"""
    config: Path | None = None
    """a config.toml with all other settings of the training"""
    device: Literal["auto", "cpu", "cuda"] | None = None
    """as for train, as all below"""
    optimizer: Literal["adamw", "sgd"] | None = None
    """which one"""
    precision: Literal["fp32", "bf16", "auto"] | None = None
    """of forward and backward"""
    data_dir: Path | None = None
    """folder of IDX files"""
    stem: Literal["imagenet", "small"] | None = None
    """ResNet18's first layers"""
    out: Path | None = None
    """write everything that was found to this file, as JSON"""
    json: bool = False
    """print it as JSON instead of tables"""


CliMeasuring = Annotated[Measuring, tyro.conf.arg(name="")]  # its flags stand among the command's own


def settings_of(task: str, how: Measuring, *, num_workers: int | None = None) -> TrainConfig:
    """The training to be measured: what flags say, over --config, over the defaults.

    Raises:
        UsageError: for a wrong file, value or task.
    """
    flags = {
        "launch.device": how.device, "compute.precision": how.precision, "optimizer.optimizer": how.optimizer,
        "data.data_dir": how.data_dir, "model.stem": how.stem, "data.num_workers": num_workers,
    }  # fmt: skip
    config = configuration.load(real_path(how.config), ours=True) if how.config else TrainConfig()
    for name, value in flags.items():
        section, _, key = name.partition(".")
        if value is not None:
            config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    task = absolute_task(task)
    config = replace(config, task=task, strategy=None)
    check_values(config)
    check_task(task, task_options(config))
    return config


def check_out(how: Measuring) -> None:
    """Refuse a file that could not be written after hours of measuring.

    Raises:
        UsageError: says what is in the way.
    """
    if how.out and how.out.is_dir():
        raise UsageError(f"--out {how.out} is a folder: name a file in it")
    if how.out and not how.out.absolute().parent.is_dir():
        raise UsageError(f"--out {how.out}: the folder {how.out.absolute().parent} does not exist")


def publish(found: msgspec.Struct, how: Measuring, print_tables: Callable[[], None]) -> None:
    """Write what was found to --out, and print it as --json says: as JSON, or by `print_tables`."""
    text = msgspec.json.format(msgspec.json.encode(found), indent=2)
    if how.out:
        how.out.write_bytes(text + b"\n")
    if how.json:
        sys.stdout.write(text.decode() + "\n")
    else:
        print_tables()


def whole_numbers(flag: str, text: str) -> list[int]:
    """Whole numbers from 1 on, ascending, each once.

    Raises:
        UsageError: says how they are written.
    """
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise UsageError(f"{flag} must be whole numbers from 1 on, separated by commas, like 1,2,4; got {text!r}")
    return numbers


def positive(**numbers: int | None) -> None:
    """Refuse numbers below 1.

    Raises:
        UsageError: names the flag.
    """
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
