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

    factory: str  # the class or function, in the module of the strategy, that applies it to a model
    exact: bool = False  # the results have the same bits at every world size
    single_process: bool = False  # supports a single process only
    splits_over_gpus: bool = False  # splits a batch over the GPUs of its process; with one it only calls the model
    sharded: bool = False  # shards parameters or optimizer state over the ranks
    supports_mesh: bool = False  # supports a model that is sharded or split over a mesh (`--mesh`)
    balances: bool = True  # ranks may compute different numbers of virtual ranks without waiting (`--balance`)
    uses_grad_hooks: bool = False  # uses gradient hooks of torch, which CUDA graphs cannot record
    min_torch: tuple[str, str] = ("", "")  # the oldest release, if newer than OLDEST_TORCH, and what older ones do
    factory_kwargs: Mapping[str, str] = field(default_factory=dict[str, str])
    """The settings in `[model]` or `[network]` for this strategy only, with the keywords of its factory."""
    session_factory_kwargs: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Arguments of the factory in sessions, whose scripts can read gradients."""


SLOW_NETWORK_SETTINGS = ("compress", "powersgd_rank", "local_steps", "outer_lr", "outer_momentum")
"""The settings for a slow network between nodes."""
COMPRESS = ("bf16", "int8", "powersgd")

STRATEGY_INFO: Mapping[str, StrategyInfo] = {
    "single": StrategyInfo("Single", single_process=True, supports_mesh=True),
    "dp": StrategyInfo("DataParallel", single_process=True, splits_over_gpus=True),
    "manual": StrategyInfo("Manual"),
    "bucketed": StrategyInfo(
        "bucketed", supports_mesh=True, factory_kwargs={name: name for name in SLOW_NETWORK_SETTINGS}
    ),
    "ddp": StrategyInfo(
        "DDP", balances=False, uses_grad_hooks=True, session_factory_kwargs={"gradient_as_bucket_view": False}
    ),
    "exact": StrategyInfo("Exact", exact=True),
    "zero": StrategyInfo("Zero", exact=True, sharded=True),
    "fsdp": StrategyInfo(
        "FSDP",
        sharded=True,
        balances=False,
        supports_mesh=True,
        factory_kwargs={"fsdp_wrap": "wrap"},
        min_torch=("2.13", "mix up gradients of parameters used on some ranks only"),
    ),
}

DEFAULT_STRATEGY = "bucketed"
SINGLE_PROCESS_STRATEGY = "single"  # the default for a single process, and the reference for all other strategies
EXACT_STRATEGIES = tuple(name for name, info in STRATEGY_INFO.items() if info.exact)
MULTI_PROCESS_STRATEGIES = tuple(name for name, info in STRATEGY_INFO.items() if not info.single_process)

if TYPE_CHECKING:
    StrategyName = str  # a type checker cannot know what is in a table
else:
    StrategyName = Literal[tuple(STRATEGY_INFO)]


def unsupported_settings(strategy: str) -> dict[str, str]:
    """The settings that `strategy` does not support, each with the strategy that does."""
    supported, infos = STRATEGY_INFO[strategy].factory_kwargs, STRATEGY_INFO.items()
    return {option: name for name, info in infos for option in info.factory_kwargs if option not in supported}


def check_can_balance(balance: str | None, strategy: str, virtual_ranks: int, ranks: int) -> None:
    """Raise UsageError if `--balance` cannot change the time of a step."""
    if strategy not in (allowed := [name for name in MULTI_PROCESS_STRATEGIES if STRATEGY_INFO[name].balances]):
        raise UsageError(code="balance-strategy", value=balance, strategy=strategy, allowed=allowed)
    if virtual_ranks <= ranks:
        raise UsageError(code="balance-needs-virtual-ranks", value=balance, virtual_ranks=virtual_ranks, more=4 * ranks)


def check_can_audit(
    every: int | None, on_audit: str, strategy: str, ranks: int, *, has_agent: bool, fixed_nodes: int = 0
) -> None:  # fmt: skip
    """Raise UsageError if `--audit-every` cannot compare the bits of two ranks, or `--on-audit` has no effect."""
    if every is not None and strategy not in EXACT_STRATEGIES:
        raise UsageError(code="audit-strategy", value=every, strategy=strategy, allowed=[*EXACT_STRATEGIES])
    if every is not None and ranks == 1:
        raise UsageError(code="audit-needs-ranks", value=every)
    if on_audit == "exclude" and (every is None or not has_agent):
        raise UsageError(code="audit-without-agent" if every else "on-audit-alone", value=on_audit)
    if on_audit == "exclude" and fixed_nodes:
        raise UsageError(code="exclude-from-fixed-nodes", value=on_audit, nodes=fixed_nodes)


def find_network_settings_error(settings: Mapping[str, Any]) -> UsageError | None:
    """The error in the values of SLOW_NETWORK_SETTINGS, by name; None if they are valid together."""
    compress, rank, steps, rate, momentum = (settings[name] for name in SLOW_NETWORK_SETTINGS)
    contradictions = {
        "powersgd-rank-alone": rank is not None and compress != "powersgd",
        "outer-step-alone": steps is None and (rate, momentum) != (None, None),
        "local-steps-below-one": steps is not None and steps < 1,
        "unknown-compression": compress not in (None, *COMPRESS),
        "outer-step-out-of-range": steps is not None and not ((rate is None or rate > 0) and 0 <= (momentum or 0) < 1),
    }
    code = next((code for code, is_true in contradictions.items() if is_true), "")
    return UsageError(code=code, **settings, allowed=[*COMPRESS]) if code else None
