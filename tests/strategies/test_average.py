"""The moving average of the weights: right, the same under every strategy and world size, evaluated and saved."""

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests import warm
from tests.ended import digest
from tests.run_script import run_script

from paceline.checkpoint.shards import hash_tensors
from paceline.rank.world import World
from paceline.strategies import STRATEGIES
from paceline.strategies.average import EmaWeights

TASK = """
import torch
import torch.nn.functional as F
from torch import nn
from paceline import ArrayDataset, Task

inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
labels = (inputs.sum(1) > 0).long()
model = lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
task = Task(model, lambda split: ArrayDataset(inputs, labels), lambda o, t: F.cross_entropy(o, t, reduction="none"))
"""


def train(folder: Path, run: str, nproc: int, *words: object) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(TASK)
    flags = ("--run-dir", run, "--virtual-ranks", 3, "--global-batch", 16, "--threads-per-rank", 1)
    words = ("-m", "paceline", "train", "mine.py:task", "--ema", 0.9, *flags, *words)
    if "--rehearse-preemption" in words:  # the launcher starts it again
        return warm.run((*words, "--nproc", nproc), cwd=folder)
    return run_script(nproc, *words, cwd=folder)


def test_it_is_the_average_that_one_would_write_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # or torch.optim sets it, and it stays
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    world = World(0, 1, 0, 1, torch.device("cpu"), "gloo")
    replica = STRATEGIES["single"](model, lambda p: torch.optim.SGD(p, lr=0.1), world)
    average = replica.average = EmaWeights(replica.state(), 0.75)
    by_hand = model.weight.detach().clone()
    for step in range(3):
        with torch.no_grad():
            model.weight.add_(step + 1)
        average.update()
        by_hand = 0.75 * by_hand + 0.25 * model.weight.detach()
    weights = model.weight.detach().clone()
    with replica.evaluated():
        torch.testing.assert_close(replica.weights()["weight"], by_hand)
    assert torch.equal(model.weight, weights)
    held = {one.name: one.tensor for one in replica.state()}
    torch.testing.assert_close(held["ema/weight"], by_hand)
    assert torch.equal(held["model/weight"], weights)


@pytest.mark.slow
@pytest.mark.timeout(720)
def test_one_average_at_every_world_size_and_under_every_strategy_also_after_a_resume(tmp_path: Path) -> None:
    digests: dict[str, str] = {}
    for run, nproc, strategy in (("a", 1, "exact"), ("c", 2, "zero")):
        done = train(tmp_path, run, nproc, "--strategy", strategy, "--epochs", 2)
        assert done.returncode == 0, done.stderr
        digests[run] = hash_tensors(load_file(tmp_path / run / "model-ema.safetensors"))
    again = (tmp_path, "d", 2, "--strategy", "exact", "--epochs", 2)
    stopped = train(*again[:2], 3, *again[3:], "--rehearse-preemption", 5)
    assert stopped.returncode == 0 and (tmp_path / "d" / "attempt-2").is_dir(), stopped.stderr
    digests["d"] = hash_tensors(load_file(tmp_path / "d" / "model-ema.safetensors"))
    assert len(set(digests.values())) == 1, digests
    assert digest(tmp_path / "a") not in digests.values()

    sharded = train(tmp_path, "e", 2, "--strategy", "fsdp", "--epochs", 2)
    assert sharded.returncode == 0, sharded.stderr
    whole, cut = (load_file(tmp_path / run / "model-ema.safetensors") for run in ("a", "e"))
    for name, tensor in whole.items():
        torch.testing.assert_close(cut[name], tensor, rtol=1e-4, atol=1e-5)
