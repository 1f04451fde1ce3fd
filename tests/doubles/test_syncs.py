"""How often a step makes the host wait for the device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.doubles import syncs
from tests.run_ranks import run_ranks
from torch import nn
from torch.nn import functional

from paceline.data.loader import MicroBatch
from paceline.data.plan import Work
from paceline.strategies import STRATEGIES
from paceline.sums.gather import gather_over_torch
from paceline.train.step import TaskSteps
from paceline.worker.world import World


def reads(rank: int, world_size: int, strategy: str, clip: float | None) -> dict[str, int]:
    """Of the second step of rank 0 of 2, by the line that asks."""
    dist.destroy_process_group()
    syncs.register()
    dist.init_process_group(syncs.BACKEND, store=dist.HashStore(), rank=0, world_size=2)

    def alike(words: Any, size: int, device: object = None) -> list[Any]:
        return [words] * size  # what ranks tell each other before the first step

    for module in [*sys.modules.values()]:
        if vars(module).get("gather_over_torch") is gather_over_torch:
            vars(module)["gather_over_torch"] = alike
    meta = torch.device("meta")
    with meta:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    world = World(0, 2, 0, 2, meta, syncs.BACKEND)
    replica = STRATEGIES[strategy](model, lambda p: torch.optim.AdamW(p, lr=1e-3), world, virtual_ranks=2)
    steps = TaskSteps(
        replica, lambda outputs, targets: functional.mse_loss(outputs, targets, reduction="none").mean(1), max_norm=clip
    )
    counter = syncs.HostReads()
    for step in range(2):
        batch = MicroBatch(
            torch.empty(4, 8, device=meta), torch.empty(4, 4, device=meta), Work(0, step, 0, 0, torch.arange(4)), 5
        )
        counter.lines.clear()
        with counter:
            steps.take([batch])
    return dict(counter.lines)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["bucketed", "exact"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_waits_for_the_totals_and_for_whether_gradients_are_finite(
    strategy: str, clip: float | None, tmp_path: Path
) -> None:
    (found,) = run_ranks(reads, 1, tmp_path, strategy, clip)
    assert sum(found.values()) == 2, found  # with clipping it was five
    assert sum("sums/totals.py" in line for line in found) == 1
