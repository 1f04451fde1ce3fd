"""`paceline train` end to end: real processes on a small piece of the real MNIST."""

import json
from collections import Counter
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.errors import codes

from paceline.config.settings import load
from paceline.runs.events import SampleIndices, Step, read_events

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(270), pytest.mark.sample(2)]
TORCHRUN = ("-m", "torch.distributed.run")
QUICK = ("--batch-size", 32, "--epochs", 1, "--log-interval", 4)

TASKS = """
import os
import torch
from torch import nn
from paceline import ArrayDataset, Task

rank = int(os.environ.get("RANK", 0))
calls = 0

def data(split):
    return ArrayDataset(torch.arange(60.0).reshape(60, 1) / 60, torch.arange(60.0) / 60)

def loss(outputs, targets):
    return (outputs[:, 0] - targets).square()

def model():
    return nn.Linear(1, 1)

good = Task(model, data, loss)
scalar = Task(model, data, lambda o, t: loss(o, t).mean())
other_model = Task(lambda: nn.Linear(1, 1 + rank), data, loss)
other_data = Task(model, lambda s: ArrayDataset(data(s).inputs + rank, data(s).targets), loss)

def fails_here(split):
    if rank == 1:
        raise ValueError("bad folder 4711")
    return data(split)

one_rank_fails = Task(model, fails_here, loss)

def nan_loss(outputs, targets):
    global calls
    calls += torch.is_grad_enabled()
    return loss(outputs, targets) * (float("nan") if rank == 1 and calls == 4 else 1)  # the first call is before step 1

nan = Task(model, data, nan_loss)

def raising_loss(outputs, targets):
    global calls
    calls += torch.is_grad_enabled()
    if rank == 1 and calls == 3:
        raise ValueError("bad sample 4711")
    return loss(outputs, targets)

raising = Task(model, data, raising_loss)
"""


def summary_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def test_two_processes_leave_a_whole_run_folder(paceline, small_mnist, tmp_path):
    run_dir = tmp_path / "run"
    run = paceline("train", "mnist-cnn", "--data-dir", small_mnist, "--nproc", 2, *QUICK, "--record-samples",
                   "--run-dir", run_dir, "--lr-scaling", "linear", "--lr-base-batch", 32)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "2 ranks x 1 micro-batch x 32" in run.stdout
    assert "0.002 = 0.001 x " in run.stdout
    assert str(run_dir) in run.stdout
    names = {"config.toml", "environment.json", "events-0.jsonl", "events-1.jsonl", "model.safetensors", "summary.json"}
    assert names <= {p.name for p in run_dir.iterdir()}
    summary = summary_of(run_dir)
    assert summary["exit"] == 0
    assert (summary["world_size"], summary["global_batch"], summary["steps"]) == (2, 64, 10)
    assert (summary["epochs"], summary["samples_seen"], summary["strategy"]) == (1, 600, "bucketed")
    assert summary["test_accuracy"] > 0.3  # ten steps of learning
    assert summary["test_accuracy"] * 200 == pytest.approx(round(summary["test_accuracy"] * 200))  # of 200 samples
    assert len(summary["weights_sha256"]) == 64
    with safe_open(run_dir / "model.safetensors", "pt") as weights:
        assert "module" not in str(weights.keys())  # the model's own names
    events = [list(read_events(run_dir / f"events-{rank}.jsonl")) for rank in range(2)]
    seen = Counter(i for rank in events for e in rank if isinstance(e, SampleIndices) for i in e.indices)
    assert seen == Counter(range(600))  # each sample once, no more
    losses = [[e.loss for e in rank if isinstance(e, Step)] for rank in events]
    assert losses[0] == losses[1]  # the loss is global
    assert load(run_dir / "config.toml", must_own=True).data.global_batch == 64


@pytest.mark.slow
def test_the_same_run_from_its_config_by_torchrun_and_again(paceline, small_mnist, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    run = paceline("train", "mnist-cnn", "--data-dir", small_mnist, "--nproc", 2, "--steps", 4, "--run-dir", first)
    assert run.returncode == 0, run.stderr
    again = paceline("train", "mnist-cnn", "--nproc", 2, "--run-dir", first)
    assert again.returncode == 2  # never written over
    run = paceline("--standalone", "--nproc-per-node", 2, "-m", "paceline", "train", "--config", first / "config.toml",
                   "--run-dir", second, env={"OMP_NUM_THREADS": "1"}, command=TORCHRUN)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert summary_of(first)["weights_sha256"] == summary_of(second)["weights_sha256"]


def test_a_world_of_one_in_this_very_process(paceline, small_mnist, tmp_path):
    run = paceline("train", "mnist-cnn", "--data-dir", small_mnist, "--steps", 2, "--batch-size", 8,
                   "--optimizer", "sgd", "--accumulation", 2, "--virtual-ranks", 2, "--run-dir", "here")  # fmt: skip
    assert run.returncode == 0, run.stderr
    summary = summary_of(tmp_path / "here")
    assert (summary["strategy"], summary["global_batch"], summary["virtual_ranks"]) == ("single", 32, 2)


def test_a_batch_larger_than_the_data_is_said(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(TASKS)
    run = paceline("train", "mine.py:good", "--batch-size", 100, "--epochs", 3)
    assert run.returncode == 0, run.stderr
    assert "one step on 60 " in run.stdout and "3 steps in all" in run.stdout


@pytest.mark.parametrize(
    ("task", "code", "words"),
    [
        ("one_rank_fails", 2, ["ValueError: bad folder 4711", "rank 1 of 2", "fails_here"]),
        ("nan", 5, ["rank 1 (", "not finite at epoch 1, step 3", "rank 1: samples"]),
        ("raising", 1, ["rank 1", "ValueError: bad sample 4711", "raising_loss"]),
        # what the ranks agree is wrong is told by one of them
        ("scalar", 2, ["one value per sample", "reduction='none'"]),
        ("other_model", 2, ["differ", "rank 0", "rank 1", "(1, 1)", "(2, 1)"]),
        ("other_data", 2, ["training data differ", "rank 0 has", "rank 1 has"]),
    ],
)
def test_what_fails_in_the_workers_is_told_once_and_names_the_rank(paceline, tmp_path, task, code, words):
    (tmp_path / "mine.py").write_text(TASKS)
    agreed = task in ("scalar", "other_model", "other_data")
    more, ranks = ((), 2) if agreed else (("--nproc", 2), 0)
    run = paceline("train", f"mine.py:{task}", *more, "--batch-size", 5, "--run-dir", "run", ranks=ranks)
    assert run.returncode == code, run.stderr
    for word in words:
        assert word in run.stderr
    assert run.stderr.count(words[0]) == 1
    assert "Connection closed" not in run.stderr
    assert summary_of(tmp_path / "run")["exit"] == code


def test_a_module_that_fails_to_import_is_told_by_its_own_line(paceline, tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_package\ntask = None\n")
    run = paceline("train", "mine:task", "--nproc", 2)
    assert run.returncode == 2
    assert codes(run.stderr) == ["import-failed"]
    assert run.stderr.count("'no_such_package'") == 1 and "mine.py:1: import" in run.stderr


@pytest.mark.root
def test_a_full_disk_does_not_cost_the_weights(paceline, tmp_path):
    import subprocess

    (tmp_path / "mine.py").write_text(TASKS)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", disk], check=True)
    try:
        run = paceline(
            "train", "mine.py:good", "--nproc", 2, "--batch-size", 1, "--epochs", 50, "--run-dir", disk / "run"
        )
    finally:
        subprocess.run(["umount", disk], check=True)
    assert run.returncode == 1, run.stderr
    assert "No space left" in run.stderr
    assert "rescued to" in run.stderr
    assert list(tmp_path.glob("*-rescued.safetensors"))
