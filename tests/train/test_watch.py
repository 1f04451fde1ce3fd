"""One bit that differs between ranks is seen, and named, before it is saved."""

import re

import pytest
import torch
from tests.errors import codes
from tests.run_ranks import run_ranks
from torch import nn

from paceline import BatchPlan, LoadingOptions, load_steps, train_step
from paceline.checkpoint.state import TensorShard
from paceline.collectives.batchnorm import convert_sync_batchnorm
from paceline.collectives.control import new_group
from paceline.config.mesh import Mesh
from paceline.data.arrays import ArrayDataset
from paceline.data.plan import virtual_ranks_of
from paceline.errors import PacelineError
from paceline.rank.world import World
from paceline.runs.events import Step, read_events
from paceline.strategies import STRATEGIES
from paceline.train.consistency import check_replicas

# ---- ranks -------------------------------------------------------------------------------------------------------


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    with torch.no_grad():
        tensor.view(-1)[-1:].view(torch.uint8)[0] ^= 1 << bit


def words_of(held: list[TensorShard], world: World, step: int) -> str:
    """What this rank raises, with its type and exit code; empty for nothing."""
    try:
        check_replicas(held, world, step)
    except PacelineError as error:
        return f"{type(error).__name__} {int(error.exit_code)}: {error}"
    return ""


def trained(world: World, *, synchronised: bool) -> list[TensorShard]:
    """The state of a small model after a step, as its strategy holds it."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    if synchronised:
        model = convert_sync_batchnorm(model, new_group())
    replica = STRATEGIES["bucketed"](model, lambda p: torch.optim.AdamW(p), world)
    data = ArrayDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(12))
    share = virtual_ranks_of(world.size, world.rank, world.size)
    loading, plan = LoadingOptions(world.device), BatchPlan(12, 12, world.size)
    for batch in load_steps(data, plan, share, loading, start=0, stop=1, merged=synchronised):
        train_step(replica, batch, lambda o, t: (o[:, 0] - t).square())
    return replica.state()


def damaged(rank: int, size: int) -> list[dict[str, str]]:
    """What this rank is told of each kind of state when a bit is wrong on rank 1, and when it is on ranks 2 and 3."""
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo")
    held = trained(world, synchronised=True)
    own = [h for h in trained(world, synchronised=False) if h.name.startswith("buffers/")]
    assert own and not any(h.replicated for h in own)
    return [told_of(held, own, world, causes) for causes in ([1], [2, 3])]


def told_of(held: list[TensorShard], own: list[TensorShard], world: World, causes: list[int]) -> dict[str, str]:
    by_name = {h.name: h.tensor for h in held}
    found = {"nothing": words_of(held, world, 6), "a virtual rank's own": words_of(own, world, 6)}
    for name in ("model/0.weight", "optimizer/2.bias/exp_avg", "optimizer/0.bias/step", "buffers/1.running_mean"):
        for _ in range(2):  # damaged, and mended again
            if world.rank in causes:
                flip(by_name[name], bit=3)
            found.setdefault(name, words_of(held, world, 6))
    for _ in range(2):
        if world.rank in causes:
            for name in (name for name in by_name if name.startswith("model/")):
                flip(by_name[name])
        found.setdefault("all", words_of(held, world, 6))
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_the_damaged_tensor_is_named_and_the_rank_in_the_minority_but_nobody_in_a_tie(tmp_path):
    ranks = run_ranks(damaged, 4, tmp_path)
    for case, who in enumerate(("on rank 1, against the majority of 4 ranks", "between all ranks, without a majority")):
        told, *others = (found[case] for found in ranks)
        for found in (told, *others):
            assert found.pop("nothing") == found.pop("a virtual rank's own") == ""
        assert f"and 3 more differs {who}" in told.pop("all")
        assert len(told) == 4
        for name, words in told.items():
            assert words.startswith("TrainingError 6: ") and f"step 6 {name} differs {who}." in words
            assert all(found[name].startswith("ReportedByPeer 6") for found in others)


# ---- end to end --------------------------------------------------------------------------------------------------

FLIPPING = """
import os
import torch
from torch import nn
from paceline import ArrayDataset, Task

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(3, 2), 0

    def forward(self, x):
        self.calls += self.training
        if self.training and self.calls == 4 and os.environ["RANK"] == "1":
            with torch.no_grad():
                self.inner.weight.view(-1).view(torch.uint8)[9] ^= 1
        return self.inner(x)

def data(split):
    return ArrayDataset(torch.arange(192.0).reshape(64, 3) / 192, torch.zeros(64))

task = Task(Model, data, lambda outputs, targets: (outputs[:, 0] - targets).square())
"""


@pytest.mark.ranks
@pytest.mark.timeout(270)
@pytest.mark.parametrize(("every", "found_after"), [(5, 5), pytest.param(100, 6, marks=pytest.mark.slow)])
def test_a_flipped_bit_ends_the_run_at_the_next_look_and_is_never_saved(paceline, tmp_path, every, found_after):
    """Step 4 flips it; checkpoints are due at 3 and 6."""
    (tmp_path / "mine.py").write_text(FLIPPING)
    run = paceline("train", "mine.py:task", "--batch-size", 4, "--check-replicas-every", every,
                   "--checkpoint-every", 3, "--run-dir", "run", ranks=2)  # fmt: skip
    assert run.returncode == 6, run.stderr
    assert codes(run.stderr) == ["replicas-differ"]
    assert len(re.findall(rf"step {found_after} .*inner\.weight .*ranks 0 \w+ 1\b", run.stderr)) == 1
    saved = {p.name for p in (tmp_path / "run/checkpoints").glob("step-*")}
    assert saved <= {"step-00000003"}  # which may still be on its way to the disk
    for rank in range(2):
        steps = [e.step for e in read_events(tmp_path / f"run/events-{rank}.jsonl") if isinstance(e, Step)]
        assert steps == list(range(1, found_after + 1))


def stages_that_drift(rank: int, world_size: int, flipped_on: int) -> str:
    world = World(rank, world_size, rank, world_size, torch.device("cpu"), "gloo", mesh=Mesh.parse("pipeline=2,data=2"))
    stage, copy = divmod(rank, 2)
    held = [TensorShard(f"model/{stage}", torch.ones(3), replicated=False, is_saved_elsewhere=copy > 0)]
    if rank == flipped_on:
        flip(held[0].tensor)
    try:
        check_replicas(held, world, 7)
    except PacelineError as error:
        return error.message_with_code
    return ""


@pytest.mark.ranks
def test_of_stages_those_that_hold_the_same_are_compared(tmp_path):
    assert run_ranks(stages_that_drift, 4, tmp_path, -1) == [""] * 4
    told, *others = run_ranks(stages_that_drift, 4, tmp_path, 3)
    assert codes(told) == ["replicas-differ"] and "step 7 model/1 " in told and "ranks 2 and 3" in told
    assert all(others)


def drifted(rank: int, size: int, weight_decay: float) -> str:
    world, weight = World(rank, size, rank, size, torch.device("cpu"), "gloo"), nn.Parameter(torch.full((2,), rank / 2))
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=weight_decay * rank)
    try:
        check_replicas([TensorShard("model/weight", weight.detach())], world, 7, [optimizer])
    except PacelineError as error:
        return error.message_with_code
    return ""


@pytest.mark.ranks
def test_settings_of_an_optimizer_that_differ_are_named_as_the_cause(tmp_path):
    told, _ = run_ranks(drifted, 2, tmp_path, 0.5)
    assert codes(told) == ["replicas-differ-by-settings"] and re.search(r"weight_decay=0\.0, \w+=0\.5", told)
    assert codes(run_ranks(drifted, 2, tmp_path, 0.0)[0]) == ["replicas-differ"]
