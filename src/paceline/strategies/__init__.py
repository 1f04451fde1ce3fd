"""The ladder: one file and one function for each way to train on many devices."""

from paceline.strategies.base import MakeOptimizer, Replica, Strategy
from paceline.strategies.bucketed import bucketed
from paceline.strategies.ddp import ddp
from paceline.strategies.dp import dp
from paceline.strategies.exact import exact
from paceline.strategies.fsdp import fsdp
from paceline.strategies.manual import manual
from paceline.strategies.single import single
from paceline.strategies.zero import zero

STRATEGIES: dict[str, Strategy] = {
    "single": single,
    "dp": dp,
    "manual": manual,
    "bucketed": bucketed,
    "ddp": ddp,
    "exact": exact,
    "zero": zero,
    "fsdp": fsdp,
}

__all__ = ["STRATEGIES", "MakeOptimizer", "Replica", "Strategy"]
