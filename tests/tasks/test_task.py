"""A wrong field of a Task, and a wrong name for one, is told in one line that says what to write."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.errors import ended_with, raises
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Task
from paceline.tasks.registry import check_task_without_import


def data(split: str) -> TensorDataset:
    return TensorDataset(torch.zeros(8, 2), torch.zeros(8))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, 0] - targets


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"make_model": nn.Linear(2, 2)}, "make-model-is-a-model"),
    ({"make_model": 3}, "task-not-a-function"),
    ({"make_model": lambda size: size}, "make-model-arguments"),
    ({"make_dataset": data("train")}, "make-dataset-is-a-dataset"),
    ({"make_dataset": DataLoader(data("train"))}, "make-dataset-is-a-dataset"),
    ({"make_dataset": lambda: data("train")}, "make-dataset-arguments"),
    ({"loss": 0.5}, "task-not-a-function"),
    ({"metrics": [loss]}, "metrics-not-a-table"),
    ({"metrics": {"accuracy": 1}}, "task-not-a-function"),
    ({"metrics": {"loss": loss}}, "metric-called-loss"),
    ({"splits": ("test",)}, "task-splits"),
    ({"splits": ("train", "valid")}, "task-splits"),
    ({"splits": "train"}, "task-splits"),
    ({"collate": "default"}, "task-not-a-function"),
]


@pytest.mark.parametrize(("field", "code"), WRONG, ids=lambda value: "" if isinstance(value, dict) else value)
def test_a_wrong_field_is_told(field: dict[str, Any], code: str) -> None:
    right = {"make_model": lambda: nn.Linear(2, 2), "make_dataset": data, "loss": loss}
    assert Task(**right)
    with raises(code) as caught:
        Task(**{**right, **field})
    assert code != "task-not-a-function" or caught.value.fields["name"].partition("[")[0] in field


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
    with raises("task-is-a-file", value="base.py", tasks="base.py:task or base.py:other"):
        check_task_without_import("base.py", {})
    Path("empty.py").write_text("import os")
    with raises("task-is-a-file", tasks="empty.py:NAME"):
        check_task_without_import("empty.py", {})


NAMES = (
    FILE
    + """
def make() -> Task: return task
def made(): return Task(make_model=dict, make_dataset=data, loss=max)
def main(): local = made()
third = made()
if True: by_hand = 3
"""
)
TASKS_IN_IT = ["task", "other", "make", "made", "third"]


@pytest.mark.parametrize("name", ["tusk", "local", "split"])
def test_a_name_that_the_file_does_not_define_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.py").write_text(NAMES)
    with raises("unknown-name", value=name, allowed=TASKS_IN_IT):
        check_task_without_import(f"base.py:{name}", {})
    for there in (*TASKS_IN_IT, "by_hand", "Task"):  # what it is, only the ranks know
        check_task_without_import(f"base.py:{there}", {})


@pytest.mark.parametrize(
    "line", ["from os import *", "globals()['tusk'] = 1", "def __getattr__(name): ...", "def f():\n    global tusk",
             "import sys; sys.modules[__name__].tusk = 1", "def f():\n    setattr(f, 'tusk', 1)"],
)  # fmt: skip
def test_a_name_that_only_an_import_would_tell_is_left_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.py").write_text(f"{FILE}{line}\n")
    check_task_without_import("base.py:tusk", {})


@pytest.mark.parametrize("more", ["", "from os import *"])
def test_an_unknown_name_lists_tasks_only(tmp_path: Path, more: str) -> None:
    """Also if only the ranks can know that it is unknown."""
    (tmp_path / "base.py").write_text(f"{FILE}{more}\n")
    done = warm.run(("-m", "paceline", "train", "base.py:tusk"), agents=False, cwd=tmp_path)
    ended_with(done, "unknown-name")
    assert "task, other" in done.stderr and "data" not in done.stderr
