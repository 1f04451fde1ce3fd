"""`--task-arg name=value`: a task's own settings are typed, listed, recorded and compared."""

import sys
from pathlib import Path

import pytest
from tests.cli.conftest import paceline as paceline
from tests.cli.test_bad_input import WITHOUT_TORCH
from tests.errors import codes, ended_with, raises

from paceline.config.settings import TrainConfig, config_to_toml, load
from paceline.tasks.registry import load_task
from paceline.tasks.settings import complete_task_args, convert_settings, parse_settings_from_source, settings_help

TASK = """
import sys
from pathlib import Path
from typing import Literal, Optional
import typing

if Path("torchless").exists():
    raise RuntimeError("imported")

import torch
from torch import nn
from paceline import ArrayDataset, Task

SEEN = {}

def data(split):
    return ArrayDataset(torch.arange(24.0).reshape(12, 2) / 24, torch.zeros(12))

def loss(outputs, targets):
    return (outputs.sum(1) - targets).square()

def task(
    width: int, scale: float = 0.5, *, deep: bool = False, act: Literal["relu", "gelu"] = "relu",
    seed: int | None = None, name: "Optional[str]" = None, corpus: Path = Path("none"), bare=3, odd: nn.Module = None,
    size: typing.Literal[1, 2] = 1,
):
    SEEN.clear()
    SEEN.update(locals())
    return Task(lambda: nn.Linear(2, width), data, loss)

plain = task(2)
open_ended = lambda **given: task(2)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a task's folder is added to it
    monkeypatch.delitem(sys.modules, "with_settings", raising=False)
    (tmp_path / "with_settings.py").write_text(TASK)
    return tmp_path


NAME = "with_settings.py:task"


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"width": "4"}, 4), ({"scale": "1e-3"}, 0.001), ({"scale": "2"}, 2.0), ({"deep": "true"}, True),
        ({"deep": "False"}, False), ({"act": "gelu"}, "gelu"), ({"seed": "none"}, None), ({"seed": "7"}, 7),
        ({"name": "None"}, None), ({"name": "007"}, "007"), ({"corpus": "a/b"}, Path("a/b")), ({"bare": "8"}, 8),
        ({"size": "2"}, 2),
    ],
)  # fmt: skip
def test_a_value_gets_the_type_of_its_annotation(mine, given, value):
    found = convert_settings(NAME, parse_settings_from_source(NAME), {"width": "1", **given})[next(iter(given))]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("given", "code", "fields"),
    [
        ({"widht": "4"}, "unknown-name", {"kind": f"setting of {NAME}", "value": "widht"}),
        ({"width": "big"}, "task-arg-wrong-value", {"name": "width", "reason": "Expected `int`, got `str`"}),
        ({"width": "4.5"}, "task-arg-wrong-value", {"name": "width", "value": "4.5"}),
        ({"act": "tanh"}, "task-arg-wrong-value", {"name": "act", "reason": "Invalid enum value 'tanh'"}),
        ({"deep": "yes"}, "task-arg-wrong-value", {"name": "deep", "value": "yes"}),
        ({"odd": "x"}, "task-arg-type-not-text", {"name": "odd", "annotation": "nn.Module"}),
        ({}, "task-needs-values", {"task": NAME, "name": "width"}),
    ],
)
def test_what_is_wrong_is_told(mine, given, code, fields):
    with raises(code, **fields):
        convert_settings(
            NAME, parse_settings_from_source(NAME), given if given in ({}, {"widht": "4"}) else {"width": "1", **given}
        )


def test_the_function_gets_them(mine):
    task = load_task(NAME, {"width": "3", "act": "gelu"})
    assert task.make_model().out_features == 3
    seen = task.make_dataset.__globals__["SEEN"]
    assert (seen["width"], seen["act"], seen["scale"], seen["corpus"]) == (3, "gelu", 0.5, Path("none"))
    with raises("unknown-name", kind=f"setting of {NAME}", value="n_layer"):
        load_task(NAME, {"width": "3", "n_layer": "3"})
    with raises("task-takes-no-settings", options=["width"]):
        load_task("with_settings.py:plain", {"width": "3"})


def test_all_of_them_are_in_the_definition_of_a_run(mine):
    found = complete_task_args(NAME, {"width": "3", "corpus": "a"})
    assert found == {
        "task_arg.width": 3, "task_arg.scale": 0.5, "task_arg.deep": False, "task_arg.act": "relu",
        "task_arg.seed": None, "task_arg.name": None, "task_arg.corpus": "a", "task_arg.bare": 3, "task_arg.odd": None,
        "task_arg.size": 1,
    }  # fmt: skip
    assert complete_task_args("mnist-cnn", {"data_dir": Path("x")}) == {}


def test_they_are_listed_without_importing_the_task(mine, paceline):
    (mine / "torchless").touch()
    run = paceline("train", NAME, "--help", command=("-c", WITHOUT_TORCH))
    assert run.returncode == 0, run.stderr
    assert settings_help(NAME) in run.stdout
    lines = [line.split() for line in settings_help(NAME).splitlines()]
    assert lines[1] == ["width", "int", "required"]
    assert lines[4] == ["act", "Literal['relu',", "'gelu']", "default", "'relu'"]
    run = paceline("train", NAME, "--task-arg", "width=big", "--nproc", 2, command=("-c", WITHOUT_TORCH))
    ended_with(run, "task-arg-wrong-value")


@pytest.mark.parametrize("texts", [(), ("a=4", "b=0.1", "c=true", "d=gelu", "e=007", "f=1e-3", "g=x=y", "h=nan", "i=")])
def test_a_file_holds_them_as_a_table(tmp_path, texts):
    config = TrainConfig(task="mnist-cnn", task_arg=texts)
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(config))
    assert load(path, must_own=False) == config
    assert ("[task_arg]" in path.read_text()) == bool(texts)
    path.write_text("[task_arg]\nn_layer = 4\ndeep = true\nact = 'gelu'\n")
    assert load(path, must_own=False).task_arg == ("n_layer=4", "deep=true", "act=gelu")


@pytest.mark.slow
@pytest.mark.ranks
def test_they_are_recorded_and_compared_on_resume(mine, paceline):
    run = paceline("train", NAME, "--task-arg", "width=2", "--task-arg", "width=3", "--steps", 4, "--run-dir", "run")
    assert run.returncode == 0, run.stderr
    assert "[task_arg]\nwidth = 3\n" in (mine / "run/config.toml").read_text()
    resume = ("train", "--resume", "auto", "--run-dir", "run")
    refused = paceline(*resume, "--task-arg", "scale=0.25", command=("-c", WITHOUT_TORCH))
    assert refused.returncode == 2, refused.stderr
    said = " ".join(refused.stderr.split())
    assert codes(refused.stderr) == ["another-run"]
    assert "task_arg.scale: 0.5 " in said and " 0.25 " in said and "--allow-change" in said
    run = paceline(*resume, "--task-arg", "scale=0.25", "--allow-change", "task_arg.scale,steps", "--steps", 6)
    assert run.returncode == 0, run.stderr
    assert "task_arg.scale: 0.5 " in run.stdout
    run = paceline(
        "verify", NAME, "--task-arg", "width=3", "--ranks", 1, "--strategies", "bucketed", "--optimizers", "sgd"
    )
    assert run.returncode == 0, run.stderr
