"""The number of operations on the device in a step, compared with a plain loop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.doubles import syncs
from tests.doubles.test_syncs import META, begin
from tests.run_ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional

from paceline.data.loader import MicroBatch
from paceline.data.plan import MicroBatchPlan
from paceline.rank.world import World
from paceline.stepping.order import CallOrder
from paceline.stepping.totals import Votes
from paceline.strategies import STRATEGIES
from paceline.train.step import TaskSteps

SAMPLES = 4


class Operations(syncs.HostReads):
    """Counts operations that compute or copy, without views. `ones`: numbers that are read as one; others are zero."""

    def __init__(self, ones: int = 2) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._ones = ones

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "profiler" not in func.name():
            self.found[func.name()] += 1
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.name() == "aten::_to_copy" and args[0].is_meta and not result.is_meta:
            result.view(-1)[self._ones :] = 0
        return result


def model_on_meta() -> nn.Module:
    with META:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets, reduction="none").mean(1)


def of_a_plain_loop() -> Counter[str]:
    model = model_on_meta()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False, foreach=True)
    for _ in range(3):
        inputs, targets = torch.empty(SAMPLES, 8, device=META), torch.empty(SAMPLES, 4, device=META)
        optimizer.zero_grad()
        with Operations() as counter:
            loss_of(model(inputs), targets).mean().backward()
            optimizer.step()
    return counter.found


def beyond_a_plain_loop(rank: int, world_size: int, strategy: str, ranks: int) -> tuple[int, dict[str, int]]:
    """The number of additional operations, and those that a plain loop does not have."""
    if ranks > 1:
        begin()
    world = World(0, ranks, 0, ranks, META, syncs.BACKEND)
    replica = STRATEGIES[strategy](
        model_on_meta(), lambda p: torch.optim.AdamW(p, lr=1e-3, fused=False, foreach=True), world
    )
    steps = TaskSteps(replica, loss_of, one_each=True, votes=Votes, order=CallOrder(world, lambda: 0, list, print))
    for step in range(3):
        work = MicroBatchPlan(0, step, 0, 0, torch.arange(SAMPLES), global_samples=1)
        batch = MicroBatch(torch.empty(SAMPLES, 8, device=META), torch.empty(SAMPLES, 4, device=META), work, 5)
        with Operations(ones=min(2, ranks)) as counter:  # a rank alone knows the weight
            steps.take_step([batch])
    plain = of_a_plain_loop()
    return counter.found.total() - plain.total(), dict(counter.found - plain)


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "ranks", "most"), [("single", 1, 6), ("bucketed", 1, 6), ("bucketed", 2, 9)])
def test_a_step_has_few_operations_beyond_a_plain_loop(strategy: str, ranks: int, most: int, tmp_path: Path) -> None:
    ((more, found),) = run_ranks(beyond_a_plain_loop, 1, tmp_path, strategy, ranks)
    assert more <= most, found
