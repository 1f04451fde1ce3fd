"""Every strategy by its name, with its properties that are known before torch is imported.

Strategy NAME is in paceline/strategies/NAME.py, where `paceline.strategies` finds it by STRATEGY_INFO.
The table is here because the settings take their choices from it, and because `paceline.strategies` imports torch,
which would delay every `--help`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import UsageError


@dataclass(frozen=True)
class StrategyInfo:
    """The properties of a strategy that other packages use; the defaults are those of most strategies."""

    factory: str
    """the class or function in the module of the strategy that makes it for a model"""
    exact: bool = False
    """gives the same bits at every world size"""
    one_process: bool = False
    """cannot train in a world of several ranks"""
    several_gpus: bool = False
    """splits a batch over the GPUs of its process; with fewer than two it only calls the model"""
    sharded: bool = False
    """shards parameters or optimizer state over the ranks"""
    on_mesh: bool = False
    """can train a rank's part of a sharded or split model (`--mesh`)"""
    hooked: bool = False
    """uses torch's hooks on gradients, which CUDA graphs cannot record"""
    least_torch: tuple[str, str] = ("", "")
    """the oldest release that it runs on, if newer than OLDEST_TORCH, and the fault of older ones"""
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    """the settings in `[model]` or `[network]` that only it has, and for each the keyword of its function"""
    in_own_loops: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """arguments of its function in sessions, whose scripts may read gradients"""


SLOW = ("compress", "powersgd_rank", "local_steps", "outer_lr", "outer_momentum")
"""settings for a slow network between hosts"""
COMPRESS = ("bf16", "int8", "powersgd")

STRATEGY_INFO: Mapping[str, StrategyInfo] = {
    "single": StrategyInfo("Single", one_process=True, on_mesh=True),
    "dp": StrategyInfo("DataParallel", one_process=True, several_gpus=True),
    "manual": StrategyInfo("Manual"),
    "bucketed": StrategyInfo("bucketed", on_mesh=True, options={name: name for name in SLOW}),
    "ddp": StrategyInfo("DDP", hooked=True, in_own_loops={"gradient_as_bucket_view": False}),
    "exact": StrategyInfo("Exact", exact=True),
    "zero": StrategyInfo("Zero", exact=True, sharded=True),
    "fsdp": StrategyInfo(
        "FSDP",
        sharded=True,
        on_mesh=True,
        options={"fsdp_wrap": "wrap"},
        least_torch=("2.13", "mix up gradients of parameters used on some ranks only"),
    ),
}

DEFAULT = "bucketed"
DEFAULT_ALONE = "single"
"""in a world of one rank; also the reference for all other strategies"""
EXACT = tuple(name for name, info in STRATEGY_INFO.items() if info.exact)
FOR_SEVERAL = tuple(name for name, info in STRATEGY_INFO.items() if not info.one_process)

if TYPE_CHECKING:
    StrategyName = str  # a type checker cannot know what is in a table
else:
    StrategyName = Literal[tuple(STRATEGY_INFO)]


def options_of_others(strategy: str) -> dict[str, str]:
    """The settings that `strategy` does not take, each with the strategy that does."""
    own = STRATEGY_INFO[strategy].options
    return {setting: name for name, info in STRATEGY_INFO.items() for setting in info.options if setting not in own}


def network_error(settings: Mapping[str, Any]) -> UsageError | None:
    """The error in the values of SLOW, by name; None if they are valid together."""
    compress, rank, steps, rate, momentum = (settings[name] for name in SLOW)
    contradictions = {
        "powersgd-rank-alone": rank is not None and compress != "powersgd",
        "outer-step-alone": steps is None and (rate, momentum) != (None, None),
        "local-steps-below-one": steps is not None and steps < 1,
        "unknown-compression": compress not in (None, *COMPRESS),
        "outer-step-out-of-range": steps is not None and not ((rate is None or rate > 0) and 0 <= (momentum or 0) < 1),
    }
    code = next((code for code, is_true in contradictions.items() if is_true), "")
    return UsageError(code=code, **settings, allowed=[*COMPRESS]) if code else None
