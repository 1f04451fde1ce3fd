"""A validation split is evaluated on the way, and the test split then once, at the end; docs/evaluation.md is true."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.run_script import run_script
from tests.train.test_metrics import SAMPLES, Net, alone, data, score
from tests.train.test_metrics import scikit_learn as scikit_learn

from paceline.runs.events import Evaluated, read_events
from paceline.runs.summary import Summary, read_summary

TASK = """
import math, os, torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline import Metric, Task

SAMPLES = {"train": 40, "validation": 21, "test": 9}

def data(split):
    if split == "validation" and EMPTY: return TensorDataset(torch.ones(0, 4), torch.ones(0).long())
    drawn = torch.Generator().manual_seed(len(split))
    x = torch.randn(SAMPLES[split], 4, generator=drawn)
    if split == "validation": x += BAD * int(os.environ["RANK"])
    return TensorDataset(x, (x[:, 0] > 0).long())

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")

BAD, EMPTY = 0, False
metrics = {
    "count": Metric(lambda o, t: len(t), float),
    "undefined": Metric(lambda o, t: len(t), lambda total: math.nan),
}

def make(**more):
    more = {"metrics": metrics, "splits": ("train", "test", "validation"), **more}
    return Task(lambda: nn.Linear(4, 2), data, loss, **more)
three = make()
no_test = make(splits=("train", "validation"))
empty = three
fails = make(metrics={"fails": Metric(lambda o, t: len(t), lambda total: total["x"])})
"""


def train(folder: Path, task: str, *words: str, launched: bool = False) -> tuple[int, str, Summary | None]:
    changed = {"differs": "BAD, EMPTY = 1, False", "empty": "BAD, EMPTY = 0, True"}.get(task, "BAD, EMPTY = 0, False")
    (folder / "mine.py").write_text(TASK.replace("BAD, EMPTY = 0, False", changed))
    name = "three" if task == "differs" else task
    flags = ("--epochs", "2", "--batch-size", "10", "--run-dir", "run", *words)
    words = ("-m", "paceline", "train", f"mine.py:{name}", *flags)
    done = warm.run((*words, "--nproc", "2"), cwd=folder) if launched else run_script(2, *words, cwd=folder)
    return done.returncode, done.stdout + done.stderr, read_summary(folder / "run")


def evaluated(folder: Path) -> list[tuple[int, str, float]]:
    events = read_events(folder / "run" / "events-0.jsonl")
    return [(e.step, e.split, e.metrics["count"]) for e in events if isinstance(e, Evaluated)]


def test_validation_on_the_way_and_test_at_the_end(tmp_path: Path) -> None:
    code, told, summary = train(tmp_path, "three", "--keep-best", "count")
    assert code == 0, told
    assert evaluated(tmp_path) == [(2, "validation", 21), (4, "validation", 21), (4, "test", 9)]
    assert summary is not None and summary.validation_metrics is not None and summary.test_metrics is not None
    assert (summary.validation_metrics["count"], summary.test_metrics["count"]) == (21, 9)
    assert "undefined" not in summary.test_metrics and summary.test_loss == summary.test_metrics["loss"]
    assert summary.best == {"step": 2, "count": 21}
    assert "validation after step 2" in told and "undefined nan" in told
    done = told.partition("done: ")[2]
    assert 0 <= done.find("validation") < done.find("test")


@pytest.mark.slow
def test_a_test_split_is_evaluated_after_an_early_end_and_not_after_a_stop(tmp_path: Path) -> None:
    code, told, summary = train(tmp_path, "three", "--rehearse-preemption", "3", launched=True)  # and goes on
    assert code == 0, told
    assert evaluated(tmp_path) == [(2, "validation", 21), (4, "validation", 21), (4, "test", 9)]
    (tmp_path / "run").rename(tmp_path / "old")
    code, told, summary = train(tmp_path, "three", "--keep-best", "count", "--patience", "1", "--epochs", "9")
    assert code == 0 and summary is not None and summary.ended_early is not None, told
    assert evaluated(tmp_path) == [(2, "validation", 21), (4, "validation", 21), (4, "test", 9)]


@pytest.mark.slow
def test_there_may_be_no_test_split(tmp_path: Path) -> None:
    code, told, summary = train(tmp_path, "no_test")
    assert code == 0 and summary is not None and summary.test_metrics is None and summary.validation_metrics, told


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("fails", "This is metric 'fails', computed for 8 samples"),
        ("empty", "the validation data are empty"),
        pytest.param("differs", "the ranks' validation data differ", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_the_first_step(tmp_path: Path, task: str, words: str) -> None:
    code, told, _ = train(tmp_path, task)
    assert code == 2 and words in " ".join(told.split()), told


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.needs("torchmetrics")
@pytest.mark.needs("sklearn")
def test_the_page_is_true(scikit_learn: Any) -> None:
    f1_score, roc_auc_score = scikit_learn.f1_score, scikit_learn.roc_auc_score
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    names: dict[str, Any] = {}
    kinds: list[Any] = []
    for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(code, names)
        kinds.append(names.get("metrics"))
    own, foreign = (metrics for i, metrics in enumerate(kinds) if metrics and metrics is not kinds[i - 1])
    outputs, targets = Net()(data().inputs).detach(), data().targets
    truth = {"f1": f1_score(targets, outputs.argmax(1)), "auc": roc_auc_score(targets, score(outputs))}
    found = alone(own, 3)
    assert {name: found[name] for name in truth} == pytest.approx(truth, rel=1e-14)
    found = alone(foreign, 3)
    assert found["f1"] == pytest.approx(f1_score(targets, outputs.argmax(1), average="macro"), rel=1e-6)
    assert {"both/MulticlassPrecision", "both/MulticlassRecall"} < found.keys()
    batch, outputs = {"labels": torch.zeros(SAMPLES).long()}, type("Outputs", (), {"logits": outputs})
    assert names["loss"](outputs, batch).shape == (SAMPLES,)
