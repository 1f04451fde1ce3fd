"""When a training is evaluated, what is kept of it, who may end it, and who else is told."""

import math
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.ended import ended
from tests.errors import raises
from tests.run_script import run_script

from paceline.checkpoint.shards import hash_tensors
from paceline.config.choices import parse_checkpoint_interval
from paceline.errors import ExitCode
from paceline.runs import events, trackers
from paceline.train.evaluations import BestEvaluation

TASK = """
import time
import torch
import torch.nn.functional as F
from torch import nn
from paceline import ArrayDataset, Task

inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
labels = (inputs.sum(1) > 0).long()

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float()

def make(**more):
    loss = lambda o, t: F.cross_entropy(o, t, reduction="none")
    data = lambda split: ArrayDataset(inputs, labels)
    return Task(**{"make_model": lambda: nn.Linear(4, 2), "make_dataset": data, "loss": loss, **more})

def stop(moment):
    if moment.step == 13 and moment.rank == 1: moment.stop()

def seen(moment):
    with open(f"seen-{moment.rank}", "a") as file:
        print(moment.world_size, moment.step, moment.total_steps, sorted(moment.metrics), file=file)

judged = make(metrics={"accuracy": accuracy, "constant": lambda o, t: torch.ones(len(t))})
stops = make(on_step=stop, on_evaluation=seen, on_end=seen)
slow = make(on_step=lambda moment: time.sleep(0.05))
"""


def train(folder: Path, task: str, *words: object, nproc: int = 2) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(TASK)
    words = ("--batch-size", 8 // nproc, "--run-dir", "run", "--virtual-ranks", 2, *words)
    return run_script(nproc, "-m", "paceline", "train", f"mine.py:{task}", *words, cwd=folder)


def of(folder: Path, rank: int, kind: type[Any]) -> list[Any]:
    return [event for event in events.read_events(folder / f"events-{rank}.jsonl") if isinstance(event, kind)]


def test_the_best_is_the_first_of_the_best_by_its_own_direction() -> None:
    names = ["loss", "accuracy", "word_error"]
    found = {name: BestEvaluation(name, 2, names, {}) for name in (*names, "min:accuracy")}
    for step, value in enumerate((0.5, 0.7, 0.7, 0.2, math.nan), 1):
        for name, best in found.items():
            best.update(step, {name.rpartition(":")[2]: value})
    assert {name: (best.step, best.since, best.is_patience_exhausted) for name, best in found.items()} == {
        "loss": (4, 1, False), "word_error": (4, 1, False), "min:accuracy": (4, 1, False), "accuracy": (2, 3, True),
    }  # fmt: skip
    again = BestEvaluation("accuracy", 4, names, found["accuracy"].as_json())
    assert not again.update(6, {"accuracy": 0.7}) and again.is_patience_exhausted
    with raises("unknown-name", kind="metric", value="acuracy"):
        BestEvaluation("acuracy", None, names, {})


def test_a_rhythm_is_steps_or_a_time() -> None:
    assert [parse_checkpoint_interval(said) for said in (None, 20, "90s", "1.5min", "2h")] == [
        (None, None), (20, None), (None, 90.0), (None, 90.0), (None, 7200.0),
    ]  # fmt: skip
    for said in ("10 min", "0s", "-1h", "10m", ""):
        with raises("checkpoint-every-not-a-time", value=said):
            parse_checkpoint_interval(said)


def guest(folder: Path, settings: Mapping[str, Any]) -> trackers.Tracker:
    """A tracker that keeps, fails or hangs as its settings say."""
    hang, fails, got = settings.get("hang"), settings.get("fails"), settings["got"]
    if fails == "begin":
        raise OSError("no network")

    def log(step: int, values: Mapping[str, float]) -> None:
        if hang:
            hang.wait()
        if fails == "log":
            raise OSError("no room")
        got.append(step)

    return log, lambda: got.append("closed")


def test_a_tracker_that_fails_or_hangs_costs_the_run_nothing_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "guest", ("pytest", guest))
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    hang = threading.Event()
    for settings, got, told in (
        ({}, [1, 2, "closed"], []),
        ({"fails": "begin"}, [], ["guest is incomplete: OSError: no network"]),
        ({"fails": "log"}, ["closed"], ["guest is incomplete: OSError: no room"]),
        ({"hang": hang}, [], ["it is too slow; the newest of 2 reports are missing"]),
    ):
        said: list[str] = []
        kept: list[Any] = []
        tracking = trackers.TrackerQueue(["guest"], tmp_path, {**settings, "got": kept}, said.append)
        for step in (1, 2):
            tracking.log(step, {"loss": 1.0})
        tracking.close()
        assert kept == got
        assert len(said) == len(told) and all(words in line for words, line in zip(told, said, strict=True))
    hang.set()


def test_a_tracker_that_is_not_there_is_refused() -> None:
    assert trackers.parse_report_to(None) == []
    with raises("unknown-name", kind="tracker", value="wandv"):
        trackers.parse_report_to("wandv")


def test_evaluated_every_few_steps_it_keeps_the_best_and_ends_alike_on_all_ranks(tmp_path: Path) -> None:
    flags = ("--eval-every", 3, "--keep-best", "min:constant", "--patience", 3, "--schedule", "constant")
    done = train(tmp_path, "judged", "--epochs", 5, *flags)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    for rank in (0, 1):
        assert [event.step for event in of(run, rank, events.Evaluated)] == [3, 6, 8, 9]
        assert of(run, rank, events.Step)[-1].step == 9
    summary = ended(run)
    assert (summary.steps, summary.exit, summary.best) == (9, ExitCode.DONE, {"step": 3, "constant": 1.0})
    assert " 3 evaluations" in str(summary.ended_early)
    assert hash_tensors(load_file(run / "model.safetensors")) == summary.weights_sha256
    best = hash_tensors(load_file(run / "model-best.safetensors"))
    again = train(tmp_path, "judged", "--steps", 3, "--run-dir", "short", "--schedule", "constant")
    assert again.returncode == 0 and ended(tmp_path / "short").weights_sha256 == best


@pytest.mark.slow
def test_a_run_that_has_ended_early_takes_no_step_when_it_is_resumed_on_another_world_size(tmp_path: Path) -> None:
    flags = ("--epochs", 5, "--keep-best", "min:constant", "--patience", 2)
    assert train(tmp_path, "judged", *flags).returncode == 0
    first = ended(tmp_path / "run")
    assert first.steps == 24
    again = train(tmp_path, "judged", *flags, "--resume", "auto", nproc=1)
    assert again.returncode == 0 and "test after step 24" in again.stdout, again.stderr
    assert ended(tmp_path / "run").weights_sha256 == first.weights_sha256
    assert ended(tmp_path / "run").best == first.best


@pytest.mark.slow
def test_one_rank_may_end_a_training_and_all_functions_of_a_task_are_called_on_every_rank(tmp_path: Path) -> None:
    done = train(tmp_path, "stops", "--epochs", 5)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert (tmp_path / f"seen-{rank}").read_text() == "2 8 40 ['loss']\n" + 2 * "2 14 40 ['loss']\n"
    assert "callback" in str(ended(tmp_path / "run").ended_early)
    again = train(tmp_path, "stops", "--epochs", 5, "--resume", "auto")
    assert again.returncode == 0 and ended(tmp_path / "run").steps == 14


@pytest.mark.slow
def test_a_checkpoint_is_due_by_the_clock_of_one_rank(tmp_path: Path) -> None:
    done = train(tmp_path, "slow", "--epochs", 3, "--checkpoint-every", "0.1s", "--keep-checkpoints", 50)
    assert done.returncode == 0, done.stderr
    saved = [event.step for event in of(tmp_path / "run", 0, events.Checkpointed)]
    assert {8, 16, 24} < set(saved) and len(saved) < 24


@pytest.mark.needs("tensorboard", "wandb", "mlflow")
@pytest.mark.slow
@pytest.mark.timeout(540)
def test_real_trackers_get_what_the_run_records(tmp_path: Path) -> None:
    done = train(tmp_path, "judged", "--epochs", 2, "--report-to", "tensorboard,wandb,mlflow", "--log-interval", 5)
    assert done.returncode == 0, done.stdout + done.stderr
    run, names = tmp_path / "run", ("tensorboard", "wandb", "mlflow")
    assert not [notice for notice in of(run, 0, events.Notice) if any(name in notice.text for name in names)]
    wanted = {event.step: event.metrics["loss"] for event in of(run, 0, events.Evaluated)}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard")).Reload()
    board_has = {point.step: point.tensor_proto.float_val[0] for point in board.Tensors("test/loss")}
    assert board_has == pytest.approx(wanted)
    assert [point.step for point in board.Tensors("loss")] == [5, 10, 15, 16]
    (metrics,) = run.glob("mlflow/*/*/metrics")
    lines = [line.split() for line in (metrics / "test/loss").read_text().splitlines()]
    assert {int(step): float(value) for _, value, step, *_ in lines} == pytest.approx(wanted)
    (offline,) = run.glob("wandb/offline-run-*/run-*.wandb")
    assert offline.stat().st_size > 0
