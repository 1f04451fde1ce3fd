"""The choices of some settings, which commands and ranks share: strategies, launchers, checkpoint intervals, torch.

Strategy NAME is the function NAME in paceline/strategies/NAME.py, which `paceline.strategies` finds by STRATEGY_INFO.
The table is here because the settings take their choices from it, and because `paceline.strategies` imports torch,
which would delay every `--help`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from paceline.errors import UsageError

OLDEST_TORCH, NEWEST_TORCH = "2.11", "2.14"
"""the releases of torch that CI installs"""


@dataclass(frozen=True)
class StrategyInfo:
    """The properties of a strategy that other packages use; the defaults are those of most strategies."""

    exact: bool = False
    """promises the same bits at every world size"""
    one_process: bool = False
    """cannot train in a world of several ranks"""
    several_gpus: bool = False
    """cuts a batch over the GPUs of its process; with fewer than two it only calls the model"""
    sharded: bool = False
    """each rank holds a share only of something that the model's plain training holds whole"""
    on_mesh: bool = False
    """can train a rank's part of a model that several ranks share (`--mesh`)"""
    hooked: bool = False
    """takes each gradient in hooks of torch's own, which no recording can hold"""
    least_torch: tuple[str, str] = ("", "")
    """the oldest release that it runs on, if that is not the oldest of all, and what older ones do"""
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    """its own: the setting in `[model]` or `[network]`, None where not set, and the keyword of its function"""
    in_own_loops: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """arguments of its function there, where whoever looks at gradients is not known"""


SLOW = ("compress", "powersgd_rank", "local_steps", "outer_lr", "outer_momentum")
"""what is done between hosts on a slow network"""
COMPRESS = ("bf16", "int8", "powersgd")

STRATEGY_INFO: Mapping[str, StrategyInfo] = {
    "single": StrategyInfo(one_process=True, on_mesh=True),
    "dp": StrategyInfo(one_process=True, several_gpus=True),
    "manual": StrategyInfo(),
    "bucketed": StrategyInfo(on_mesh=True, options={name: name for name in SLOW}),
    "ddp": StrategyInfo(hooked=True, in_own_loops={"gradient_as_bucket_view": False}),
    "exact": StrategyInfo(exact=True),
    "zero": StrategyInfo(exact=True, sharded=True),
    "fsdp": StrategyInfo(
        sharded=True,
        on_mesh=True,
        options={"fsdp_wrap": "wrap"},
        least_torch=("2.13", "mix up gradients of parameters used on some ranks only"),
    ),
}

DEFAULT = "bucketed"
DEFAULT_ALONE = "single"
"""in a world of one rank; also what all others are compared with"""
EXACT = tuple(name for name, info in STRATEGY_INFO.items() if info.exact)
FOR_SEVERAL = tuple(name for name, info in STRATEGY_INFO.items() if not info.one_process)

if TYPE_CHECKING:
    StrategyName = str  # a type checker cannot know what is in a table
else:
    StrategyName = Literal[tuple(STRATEGY_INFO)]

LauncherName = Literal["local", "ssh", "slurm", "print"]

LAUNCHER_SETTINGS: dict[LauncherName, str] = {
    "local": "detach",
    "ssh": "hosts ssh sync join_timeout detach",
    "slurm": "join_timeout partition time gpus_per_node cpus_per_rank save_before sbatch follow cancel_on_interrupt",
    "print": "hosts join_timeout agent",
}
"""by launcher: the settings of [cluster] that not all launchers take; the names are also in the record of a run"""
assert tuple(LAUNCHER_SETTINGS) == get_args(LauncherName)
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def options_of_others(strategy: str) -> dict[str, str]:
    """The settings that `strategy` does not take, each with the strategy that does."""
    own = STRATEGY_INFO[strategy].options
    return {setting: name for name, info in STRATEGY_INFO.items() for setting in info.options if setting not in own}


def wrong_between_hosts(compress: str | None, rank: int | None, steps: int | None, *outer: float | None) -> str:
    """The code of what is wrong with values of SLOW; empty if nothing is."""
    contradictions = {
        "powersgd-rank-alone": rank is not None and compress != "powersgd",
        "outer-step-alone": steps is None and outer != (None, None),
        "local-steps-below-one": steps is not None and steps < 1,
        "unknown-compression": compress not in (None, *COMPRESS),
        "outer-step-out-of-range": steps is not None
        and not ((outer[0] is None or outer[0] > 0) and 0 <= (outer[1] or 0) < 1),
    }
    return next((code for code, true in contradictions.items() if true), "")


def launchers_of(setting: str) -> list[LauncherName]:
    """Those with which a setting has a meaning; all, if it is nobody's own."""
    return [name for name, own in LAUNCHER_SETTINGS.items() if setting in own.split()] or [*LAUNCHER_SETTINGS]


def steps_or_seconds(checkpoint_every: int | str | None) -> tuple[int | None, float | None]:
    """(steps, seconds) between two checkpoints, one of them None, or both.

    Raises:
        UsageError: for a text that is no time.
    """
    if not isinstance(checkpoint_every, str):
        return checkpoint_every, None
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(s|min|h)", checkpoint_every)
    if found is None or not float(found[1]):
        raise UsageError(code="checkpoint-every-not-a-time", value=checkpoint_every)
    return None, float(found[1]) * _UNITS[found[2]]


def untested_torch() -> list[str]:
    """Return one line if the installed torch is newer than any tested one."""
    release, words = _release()
    if release <= _numbers(NEWEST_TORCH):
        return []
    return [f"torch {words} is newer than the releases that paceline is tested with ({OLDEST_TORCH} to {NEWEST_TORCH})"]


def lacks_torch(strategy: str) -> str:
    """Return why the installed torch cannot run the strategy; empty if it can, or if torch is not installed here."""
    least, why = STRATEGY_INFO[strategy].least_torch
    release, words = _release()
    if not why or not release or release >= _numbers(least):
        return ""
    return f"strategy {strategy} requires torch {least} or newer (found {words}; older versions {why})"


def _release() -> tuple[tuple[int, ...], str]:
    from importlib.metadata import PackageNotFoundError, version  # 20 ms, which most commands need not spend

    try:
        words = version("torch")
    except PackageNotFoundError:
        return (), ""
    return _numbers(words), words


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(int(part) for part in words.partition("+")[0].split(".")[:2] if part.isdecimal())
