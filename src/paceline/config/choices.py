"""Choices for commands and ranks: launchers, checkpoint intervals, releases of torch."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.config.strategies import STRATEGY_INFO
from paceline.errors import UsageError

OLDEST_TORCH, NEWEST_TORCH = "2.11", "2.14"  # the releases of torch that CI installs

LauncherName = Literal["local", "ssh", "slurm", "print"]

LAUNCHER_SETTINGS: dict[LauncherName, str] = {
    "local": "detach",
    "ssh": "hosts ssh sync join_timeout detach",
    "slurm": "join_timeout partition time gpus_per_node cpus_per_rank save_before sbatch follow cancel_on_interrupt",
    "print": "hosts join_timeout agent",
}
"""By launcher, the settings of [cluster] that only some launchers use. The record of a run contains these names."""
assert tuple(LAUNCHER_SETTINGS) == get_args(LauncherName)

RENAMED_SETTINGS = {
    "fresh": "restart", "keep": "keep_checkpoints", "set": "task_arg", "stall_after": "hang_timeout",
    "stop_grace": "grace_period", "tail": "last_batch", "track": "report_to", "watch_every": "check_replicas_every",
}  # fmt: skip
"""Former names of settings -> their names. Run folders and checkpoints of earlier versions contain the former names."""
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def current_setting_name(setting: str) -> str:
    """The name of a setting, or of an argument of a task (`set.width`), that may have its former name."""
    first, dot, argument = setting.partition(".")
    return f"{RENAMED_SETTINGS.get(first, first)}{dot}{argument}"


def check_not_renamed(where: str, given: str, allowed: Collection[str]) -> None:
    """Raise UsageError if `given`, an option or an argument, is the former name of one of `allowed`."""
    prefix = "--" if given.startswith("--") else ""
    name = current_setting_name(given.removeprefix("--").replace("-", "_"))
    current = prefix + (name.replace("_", "-") if prefix else name)
    if current != given and current in allowed:
        raise UsageError(code="renamed", where=where, value=given, current=current)


def launchers_supporting_setting(setting: str) -> list[LauncherName]:
    return [name for name, names in LAUNCHER_SETTINGS.items() if setting in names.split()] or [*LAUNCHER_SETTINGS]


@dataclass(frozen=True)
class CheckpointIntervals:
    """Steps between comparisons of replicas, between snapshots and between checkpoints (None: only on request)."""

    compare_every: int
    snapshot_every: int
    checkpoint_every: int | None
    checkpoint_seconds: float | None = None
    keep: int = 2
    """The number of checkpoints to keep."""


def parse_checkpoint_interval(checkpoint_every: int | str | None) -> tuple[int | None, float | None]:
    """Convert e.g. 500 or "10min" to (steps, seconds) between checkpoints. One of them, or both, is None."""
    if not isinstance(checkpoint_every, str):
        return checkpoint_every, None
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(s|min|h)", checkpoint_every)
    if match is None or not float(match[1]):
        raise UsageError(code="checkpoint-every-not-a-time", value=checkpoint_every)
    return None, float(match[1]) * _UNITS[match[2]]


def untested_torch_notices() -> list[str]:
    version, release = _torch_release()
    if release <= _release(NEWEST_TORCH):
        return []
    tested = f"{OLDEST_TORCH} to {NEWEST_TORCH}"
    return [f"torch {version} is newer than the releases that paceline is tested with ({tested})"]


def torch_unsupported_reason(strategy: str) -> str:
    """Return why the installed torch cannot run the strategy; empty if it can, or if torch is not installed here."""
    min_version, why = STRATEGY_INFO[strategy].min_torch
    version, release = _torch_release()
    if not why or not release or release >= _release(min_version):
        return ""
    return f"strategy {strategy} requires torch {min_version} or newer (found {version}; older versions {why})"


def _torch_release() -> tuple[str, tuple[int, ...]]:
    """The installed version of torch, and its first two numbers; empty without torch."""
    from importlib.metadata import PackageNotFoundError, version  # takes 20 ms, and most commands do not need it

    try:
        return (installed := version("torch")), _release(installed)
    except PackageNotFoundError:
        return "", ()


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".")[:2] if part.isdecimal())
