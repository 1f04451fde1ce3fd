"""The ladder: every strategy by its name, and what must be known of it before torch is imported.

The strategy NAME is the function NAME in paceline/strategies/NAME.py, which `paceline.strategies` finds by this table.
The table lies outside that room because the settings (`config`), far below it, take their choices from here, and
because any import from that room imports torch, for which no `--help` can wait.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class Rung:
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

LADDER: Mapping[str, Rung] = {
    "single": Rung(one_process=True, on_mesh=True),
    "dp": Rung(one_process=True, several_gpus=True),
    "manual": Rung(),
    "bucketed": Rung(on_mesh=True, options={name: name for name in SLOW}),
    "ddp": Rung(hooked=True, in_own_loops={"gradient_as_bucket_view": False}),
    "exact": Rung(exact=True),
    "zero": Rung(exact=True, sharded=True),
    "fsdp": Rung(
        sharded=True,
        on_mesh=True,
        options={"fsdp_wrap": "wrap"},
        least_torch=("2.13", "mix up gradients of parameters used on some ranks only"),
    ),
}

DEFAULT = "bucketed"
DEFAULT_ALONE = "single"
"""in a world of one rank; also what all others are compared with"""
EXACT = tuple(name for name, rung in LADDER.items() if rung.exact)
FOR_SEVERAL = tuple(name for name, rung in LADDER.items() if not rung.one_process)

if TYPE_CHECKING:
    StrategyName = str  # a type checker cannot know what is in a table
else:
    StrategyName = Literal[tuple(LADDER)]


def options_of_others(strategy: str) -> dict[str, str]:
    """The settings that `strategy` does not take, each with the strategy that does."""
    own = LADDER[strategy].options
    return {setting: name for name, rung in LADDER.items() for setting in rung.options if setting not in own}


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


def middle(node: tuple[int, int]) -> int:
    """Where a node of the tree of exact sums is cut: at the largest power of two, as a binary counter carries.

    A node is the leaves [first, stop), two or more.

    middle((0, 6)) == 4, middle((0, 4)) == 2, middle((4, 6)) == 5
    """
    first, stop = node
    return first + (1 << ((stop - first - 1).bit_length() - 1))
