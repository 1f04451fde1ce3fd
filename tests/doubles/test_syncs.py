"""How often a step makes the host wait for the device."""

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

from paceline.collectives import shards
from paceline.collectives.torch_collectives import all_gather_json
from paceline.data.arrays import ArrayDataset
from paceline.data.loader import LoadingOptions, MicroBatch
from paceline.data.plan import MicroBatchPlan
from paceline.rank.world import World
from paceline.stepping.order import CollectiveOrderCheck
from paceline.stepping.totals import AwaitTotals, ControlFlags, TotalsReducer
from paceline.strategies import STRATEGIES
from paceline.train import evaluate as evaluations
from paceline.train.evaluate import evaluate
from paceline.train.step import TaskSteps

pytestmark = pytest.mark.sample(2)

THE_READ = "collectives/control.py"
META = torch.device("meta")


def begin() -> None:
    dist.destroy_process_group()
    syncs.join()

    def alike(words: Any, size: int, *_: object, **_more: object) -> list[Any]:
        return [words] * size  # what ranks tell each other before the first step

    for module in [*sys.modules.values()]:
        if vars(module).get("all_gather_json") is all_gather_json:
            vars(module)["all_gather_json"] = alike
    start = TotalsReducer.start

    def said_alike(self: TotalsReducer) -> AwaitTotals:
        finish = start(self)
        self._said_scale = 0.0  # what HostReads gives for the sum over ranks
        return finish

    TotalsReducer.start = said_alike
    vars(shards)["_check_no_views"] = lambda parameters: None  # all lie at address 0


def of_a_step(rank: int, world_size: int, strategy: str, clip: float | None, micro_batches: int) -> dict[str, int]:
    """The waits of one step with control flags and the order of collectives, by the line that waits."""
    begin()
    if strategy == "fsdp":
        syncs.let_fsdp_in()
    with META:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 4))
    world = World(0, 2, 0, 2, META, syncs.BACKEND)
    replica = STRATEGIES[strategy](model, lambda p: torch.optim.AdamW(p, lr=1e-3), world, virtual_ranks=4)
    steps = TaskSteps(
        replica,
        lambda outputs, targets: functional.mse_loss(outputs, targets, reduction="none").mean(1),
        max_norm=clip,
        votes=lambda: ControlFlags(shard_written=1),
        order=CollectiveOrderCheck(world, lambda: 0, list, print),
    )
    counter = syncs.HostReads()
    for step in range(3):  # in the second, DDP makes its buckets anew
        batches = [
            MicroBatch(*(torch.empty(4, width, device=META) for width in (8, 4)), plan, 5)
            for plan in (MicroBatchPlan(0, step, v, 0, torch.arange(4)) for v in range(micro_batches))
        ]
        counter.lines.clear()
        with counter:
            steps.take_step(batches)
    return dict(counter.lines)


@pytest.mark.ranks
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("strategy", ["bucketed", "ddp", "exact", "zero"])
def test_a_step_waits_once(strategy: str, clip: float | None, tmp_path: Path) -> None:
    (found,) = run_ranks(of_a_step, 1, tmp_path, strategy, clip, 2)
    assert sum(found.values()) == 1, found
    assert next(iter(found)).startswith(THE_READ)


@pytest.mark.ranks
@pytest.mark.parametrize("clip", [None, 1.0])
def test_fsdp_asks_for_the_number_of_micro_batches_as_well(clip: float | None, tmp_path: Path) -> None:
    (found,) = run_ranks(of_a_step, 1, tmp_path, "fsdp", clip, 2)
    assert sorted(line.partition(":")[0] for line in found) == sorted(["stepping/step.py", THE_READ])
    assert sum(found.values()) == 2, found


@pytest.mark.ranks
def test_the_textbook_asks_who_uses_what(tmp_path: Path) -> None:
    (found,) = run_ranks(of_a_step, 1, tmp_path, "manual", None, 2)
    assert sum(found.values()) == 3, found


def of_an_evaluation(rank: int, world_size: int, batches: int) -> dict[str, int]:
    """The waits of an evaluation of several batches, with two metrics in addition to the loss."""
    begin()
    vars(evaluations)["all_gather_tensors"] = lambda states, world, name: [states]
    with META:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    world = World(0, 2, 0, 2, META, syncs.BACKEND)
    replica = STRATEGIES["bucketed"](model, lambda p: torch.optim.AdamW(p, lr=1e-3), world, virtual_ranks=2)
    samples = 2 * 4 * batches  # of two virtual ranks
    data = ArrayDataset(torch.zeros(samples, 8), torch.zeros(samples, dtype=torch.int64))

    def hit(outputs: Any, targets: Any) -> Any:
        return (outputs.argmax(1) == targets).float()

    def loss(outputs: Any, targets: Any) -> Any:
        return functional.cross_entropy(outputs, targets, reduction="none")

    with syncs.HostReads() as counter:
        evaluate(replica, data, loss, {"one": hit, "two": hit}, LoadingOptions(META), batch_size=4)
    return dict(counter.lines)


@pytest.mark.ranks
def test_an_evaluation_waits_at_its_end_and_for_no_batch(tmp_path: Path) -> None:
    (few,), (many,) = (run_ranks(of_an_evaluation, 1, tmp_path, batches) for batches in (2, 20))
    assert few == many
    assert sum(many.values()) <= 5  # buffers, and a state of each metric: the loss has two


def test_the_counter_sees_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch sets it where a mode meets its first operation
    there, here = torch.empty(3, device="meta"), torch.ones(3)
    with syncs.HostReads() as quiet:
        there.add_(1.0).mul_(torch.full((), 2.0, device="meta"))
        here.to("meta", non_blocking=True)
        torch.tensor([1.0])
        there.copy_(here, non_blocking=True)
    assert not quiet.lines
    for waits in (
        lambda: there.tolist(),
        lambda: float(there[0]),
        lambda: bool((there > 1).all()),
        lambda: there.cpu(),
        lambda: here.to("meta"),
        lambda: torch.tensor([1.0], device="meta"),
        lambda: there.new_tensor([1.0]),
        lambda: there.copy_(here),
        lambda: here.copy_(there),
    ):
        with syncs.HostReads() as seen:
            waits()
        assert sum(seen.lines.values()) == 1
