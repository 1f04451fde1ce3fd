"""What a rank of `paceline train` imports."""

import json
from pathlib import Path

import pytest
from tests import warm

TASK = """
import os, sys
from pathlib import Path
import torch
from torch import nn
from paceline import Task
from paceline.data.arrays import ArrayDataset

def loss(outputs, targets):  # after the last step, in the evaluation, too
    told = Path(__file__).parent / ("told-" + os.environ.get("RANK", "alone"))
    told.write_text(str("paceline.launch" in sys.modules))
    return (outputs.flatten() - targets).square()

def data(split):
    x = torch.randn(96, 5, generator=torch.Generator().manual_seed(len(split)))
    return ArrayDataset(x, x.sum(1))

task = Task(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)), data, loss)
"""


@pytest.mark.parametrize(("strategy", "optimizer"), [("bucketed", "sgd"), ("exact", "adamw"), ("zero", "sgd")])
def test_ranks_that_an_agent_forks_import_no_launcher_and_get_the_same_bits(strategy, optimizer, tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    train = ["-m", "paceline", "train", "mine.py:task", "--device", "cpu", "--steps", "4", "--global-batch", "16"]
    train += ["--optimizer", optimizer, "--virtual-ranks", "2"]
    # started as a user's are: what a test's agents fork from has imported it
    words = [*train, "--nproc", "2", "--strategy", strategy, "--run-dir", "a"]
    workers = warm.run(words, cwd=tmp_path, torch=False, agents=False)
    assert workers.returncode == 0, workers.stderr
    assert [(tmp_path / f"told-{rank}").read_text() for rank in range(2)] == ["False", "False"]
    # forked from what has imported it
    alone = warm.run([*train, "--strategy", "exact", "--run-dir", "b"], cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def digest(run_dir: Path) -> str:
    """Of the weights at the end."""
    return json.loads((run_dir / "summary.json").read_text())["weights_sha256"]
