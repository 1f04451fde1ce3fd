"""Training strategies, one module for each. `paceline.config.strategies` describes them for the command line."""

from importlib import import_module

from paceline.config.strategies import STRATEGY_INFO
from paceline.strategies.base import MakeOptimizer, MakeStrategy, Strategy

STRATEGIES: dict[str, MakeStrategy] = {
    name: getattr(import_module(f"{__name__}.{name}"), info.factory) for name, info in STRATEGY_INFO.items()
}
"""The strategies by name: single, dp, manual, bucketed, ddp, exact, zero and fsdp. Each makes a `Strategy`."""

__all__ = ["STRATEGIES", "MakeOptimizer", "MakeStrategy", "Strategy"]
