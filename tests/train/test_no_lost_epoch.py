"""Whatever goes wrong after an epoch, it is on disk; what would go wrong then is tried before the first step."""

import re
from pathlib import Path

import pytest
from tests.ended import ended, start_steps
from tests.run_script import run_script

from paceline.checkpoint.manager import Checkpoints

TASK = """
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from paceline import Task

class Corrupt(Dataset):
    def __len__(self): return 40
    def __getitem__(self, index):
        if index == 34: raise OSError("sample 34 cannot be decoded")
        return torch.zeros(4), 0

seen = 0
def late(outputs, targets):
    global seen
    seen += 1
    if seen > 2: raise ValueError("the metric fails")
    return (outputs.argmax(1) == targets).float()

def data(split):
    return TensorDataset(torch.randn(80, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(80).long())

def make(**more):
    loss = lambda o, t: nn.functional.cross_entropy(o, t, reduction="none")
    return Task(**{"make_model": lambda: nn.Linear(4, 3), "make_dataset": data, "loss": loss, **more})

fine = make()
wrong_metric = make(metrics={"accuracy": lambda o, t: (o.argmax(1) == t).float().mean()})
late_metric = make(metrics={"accuracy": late})
losses = 0
def late_mean(outputs, targets):
    global losses
    losses += torch.is_grad_enabled()
    found = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return found.mean() if losses > 4 else found
late_loss = make(loss=late_mean)
corrupt_test = make(make_dataset=lambda split: Corrupt() if split == "test" else data(split))
corrupt_train = make(make_dataset=lambda split: Corrupt() if split == "train" else data(split))
class Broken(nn.Linear):
    steps = 0
    def forward(self, x):
        Broken.steps += self.training
        if Broken.steps > 7: raise ValueError("a bug of mine")
        return super().forward(x)
broken_model = make(make_model=lambda: Broken(4, 3))
"""


def train(folder: Path, task: str, nproc: int = 2, *words: str) -> tuple[int, str, list[int]]:
    (folder / "mine.py").write_text(TASK)
    words = ("--batch-size", "8", "--epochs", "2", "--run-dir", "run", *words)
    done = run_script(nproc, "-m", "paceline", "train", f"mine.py:{task}", *words, cwd=folder)
    saved = [step for step, _ in Checkpoints(folder / "run" / "checkpoints").entries()]
    return done.returncode, done.stdout + done.stderr, saved


def test_a_metric_of_the_wrong_kind_is_refused_before_the_first_step(tmp_path: Path) -> None:
    code, told, saved = train(tmp_path, "wrong_metric")
    assert (code, saved) == (2, []) and "[metric-of-batch]" in told and "step 1/" not in told


@pytest.mark.parametrize(
    ("task", "why"),
    [("late_metric", "the metric fails"), pytest.param("corrupt_test", "sample 34", marks=pytest.mark.slow)],
)
def test_an_evaluation_that_fails_costs_no_step(tmp_path: Path, task: str, why: str) -> None:
    code, told, saved = train(tmp_path, task)
    assert (code, saved) == (1, [5]) and why in told and "rescued" not in told
    assert told.count("--global-batch 16") == 1  # two ranks of 8


def test_a_sample_that_cannot_be_read_costs_no_step_and_is_no_full_disk(tmp_path: Path) -> None:
    code, told, saved = train(tmp_path, "corrupt_train", 1)
    assert code == 1 and 0 < saved[-1] < 5 and re.search(f"step {saved[-1]} is saved", told)
    assert 'raise OSError("sample 34' in told and "rescued" not in told and "--global-batch" not in told


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_wrong_use_that_shows_after_steps_ends_with_code_2_and_keeps_them(tmp_path: Path, nproc: int) -> None:
    code, told, saved = train(tmp_path, "late_loss", nproc)
    assert code == 2 and 0 < saved[-1] < 5 and "[loss-of-batch]" in told and "Traceback" not in told
    assert ended(tmp_path / "run").exit == 2


@pytest.mark.slow
def test_an_error_in_the_middle_of_an_epoch_saves_what_is_whole(tmp_path: Path) -> None:
    code, told, saved = train(tmp_path, "broken_model", 1)
    assert (code, saved) == (1, [7]) and "step 7 is saved" in told
    assert ended(tmp_path / "run").exit == 1
    again = train(tmp_path, "broken_model", 1, "--resume", "auto")
    assert start_steps(tmp_path / "run")[-1] == 7, again


@pytest.mark.slow
def test_without_checkpoints_at_epochs_there_are_none(tmp_path: Path) -> None:
    assert train(tmp_path, "fine", 2, "--no-checkpoint-epochs")[2] == []
