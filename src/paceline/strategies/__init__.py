"""One module for each way to train on many devices; `paceline.ladder` has what commands know of them."""

from importlib import import_module

from paceline.strategies.base import MakeOptimizer, MakeStrategy, Strategy

_MAKERS = {
    "single": "Single", "dp": "DataParallel", "manual": "Manual", "bucketed": "bucketed", "ddp": "DDP",
    "exact": "Exact", "zero": "Zero", "fsdp": "FSDP",
}  # fmt: skip

STRATEGIES: dict[str, MakeStrategy] = {
    name: getattr(import_module(f"{__name__}.{name}"), maker) for name, maker in _MAKERS.items()
}
"""The strategies by name: single, dp, manual, bucketed, ddp, exact, zero and fsdp. Each makes a `Strategy`."""

__all__ = ["STRATEGIES", "MakeOptimizer", "MakeStrategy", "Strategy"]
