"""What `compare` and `scale` share: their numbers, and the settings of the training that they measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline import config as configuration
from paceline.config import TrainConfig, check_values, task_options
from paceline.errors import UsageError
from paceline.launch.cgroup import usable_cores
from paceline.tasks import check_task


def settings_of(task: str, path: Path | None, flags: Mapping[str, Any]) -> TrainConfig:
    """The training to be measured: what flags say (section.name), over the file, over the defaults.

    Raises:
        UsageError: for a wrong file, value or task.
    """
    config = configuration.load(path) if path else TrainConfig()
    for name, value in flags.items():
        section, _, key = name.partition(".")
        if value is not None:
            config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    config = replace(config, task=_absolute(task), strategy=None)
    check_values(config)
    check_task(config.task, task_options(config))
    return config


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


def cores_of() -> int:
    """Cores that this command, and so what it starts, may use."""
    return usable_cores()


def _absolute(task: str) -> str:
    """A task in a file with the file's absolute path."""
    path, colon, name = task.rpartition(":")
    return f"{Path(path).resolve()}:{name}" if colon and path.endswith(".py") else task
