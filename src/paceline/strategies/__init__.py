"""The ladder: one file and one function for each way to train on many devices; `paceline.ladder` is its table."""

from importlib import import_module

from paceline.config.strategies import STRATEGY_INFO
from paceline.strategies.base import MakeOptimizer, Replica, Strategy

STRATEGIES: dict[str, Strategy] = {name: getattr(import_module(f"{__name__}.{name}"), name) for name in STRATEGY_INFO}
"""The strategies by name: single, dp, manual, bucketed, ddp, exact, zero and fsdp. Each is a `Strategy`."""

__all__ = ["STRATEGIES", "MakeOptimizer", "Replica", "Strategy"]
