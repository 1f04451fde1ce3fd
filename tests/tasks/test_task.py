"""A wrong field of a Task, and a wrong name for one, is told in one line that says what to write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Task
from paceline.errors import UsageError
from paceline.tasks import check_task


def data(split: str) -> TensorDataset:
    return TensorDataset(torch.zeros(8, 2), torch.zeros(8))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, 0] - targets


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"make_model": nn.Linear(2, 2)}, "make_model=Linear"),
    ({"make_model": 3}, "must be a function, not of type int"),
    ({"make_model": lambda size: size}, "without arguments"),
    ({"make_dataset": data("train")}, "this is a TensorDataset"),
    ({"make_dataset": DataLoader(data("train"))}, "this is a DataLoader"),
    ({"make_dataset": lambda: data("train")}, "with the split"),
    ({"loss": 0.5}, "Task\\(loss=...\\): this must be a function, not of type float"),
    ({"metrics": [loss]}, "from names to functions, .*not of type list"),
    ({"metrics": {"accuracy": 1}}, "metrics\\['accuracy'\\]"),
    ({"metrics": {"loss": loss}}, "'loss' is the mean of the task's loss"),
    ({"splits": ("test",)}, "a tuple of 'train' and"),
    ({"splits": ("train", "valid")}, "a tuple of 'train' and"),
    ({"splits": "train"}, "a tuple of 'train' and"),
    ({"collate": "default"}, "Task\\(collate=...\\)"),
]


@pytest.mark.parametrize(("field", "told"), WRONG, ids=lambda value: "" if isinstance(value, dict) else value[:20])
def test_a_wrong_field_is_told(field: dict[str, Any], told: str) -> None:
    right = {"make_model": lambda: nn.Linear(2, 2), "make_dataset": data, "loss": loss}
    assert Task(**right)
    with pytest.raises(UsageError, match=told):
        Task(**{**right, **field})


FILE = """
import os
from paceline import Task
def data(split): ...
task = Task(make_model=dict, make_dataset=data, loss=max)
other = Task(make_model=dict, make_dataset=data, loss=max)
"""


def test_a_file_without_a_name_suggests_the_tasks_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.py").write_text(FILE)
    with pytest.raises(UsageError, match=r"say which Task in it, base.py:task or base.py:other"):
        check_task("base.py", {})
    Path("empty.py").write_text("import os")
    with pytest.raises(UsageError, match=r"empty.py:NAME"):
        check_task("empty.py", {})


def test_an_unknown_name_lists_tasks_and_functions_only(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(FILE)
    words = (sys.executable, "-m", "paceline", "train", "base.py:tusk")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == 2 and "Choose from: data, task, other" in done.stderr.replace("\n", " ")
