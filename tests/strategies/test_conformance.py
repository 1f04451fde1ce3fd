"""One suite for all strategies: whatever is in STRATEGIES equals one process, on every kind of model.

A new strategy inherits all of this by its line in the dict.
"""

from pathlib import Path

import pytest
import torch
from tests.run_ranks import run_ranks

from paceline.config.choices import torch_unsupported_reason
from paceline.lab.ranks.verify import verify
from paceline.lab.verify import VerifySpec
from paceline.rank.world import World
from paceline.strategies import STRATEGIES

pytestmark = pytest.mark.sample(2)

TASKS = Path(__file__).parents[1] / "lab" / "ranks" / "tasks_under_test.py"
# DDP refuses a model with unused parameters unless told; that is its own, loud, limit.
REFUSES_UNUSED = {"ddp"}


def reports(rank: int, world_size: int, virtual_ranks: int) -> list:
    world = World(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    found = []
    for task in ("dropout", "batchnorm", "tokens", "unused", "strided", "muon"):
        strategies = [s for s in STRATEGIES if not (task == "unused" and s in REFUSES_UNUSED)]
        optimizers = (
            ["task"] if task == "muon" else ["sgd", "adamw"] if task == "dropout" or world_size > 2 else ["adamw"]
        )  # the slow ones do all
        spec = VerifySpec(f"{TASKS}:{task}", {}, strategies, optimizers, virtual_ranks, 2, 4, 0, 1.0, short_tail=True)
        found += [(task, result) for result in verify(spec, world).results]
    return found


@pytest.mark.ranks
@pytest.mark.timeout(720)
@pytest.mark.parametrize(
    ("world_size", "virtual_ranks"),
    [(1, 1), pytest.param(1, 4, marks=pytest.mark.soak), (2, 3), pytest.param(3, 4, marks=pytest.mark.soak)],
)
def test_equals_one_process(world_size, virtual_ranks, tmp_path):
    everybody = run_ranks(reports, world_size, tmp_path, virtual_ranks, timeout=660)
    ran = set()
    for task, result in everybody[0]:
        assert result.finding is None, f"{task}, {result.case}: {result.finding}"
        if result.not_run is None:
            ran.add((task, result.case.strategy))
            assert 0 <= result.errors["loss"] <= 1e-12  # something was compared
            assert result.errors["parameter"] < 1e-9
    alone = {"single"} if world_size == 1 else set()
    many = {"manual", "bucketed", "ddp", "exact", "zero", "fsdp"} - {
        s for s in STRATEGIES if torch_unsupported_reason(s)
    }
    assert ran >= {(task, s) for task in ("dropout", "batchnorm", "tokens", "strided", "muon") for s in alone | many}
    assert {("unused", s) for s in many - REFUSES_UNUSED} <= ran
