"""How a run is computed: settled by all ranks, written down, kept on a resume; and what waiting for data is told of."""

import json
import os
import tomllib

import pytest
import torch
from tests.ended import start_steps
from tests.errors import ended_with, raises
from tests.run_ranks import run_ranks

from paceline.compute.precision import bf16_unsupported_reason
from paceline.compute.resources import current_cpu_allocation, thread_warnings
from paceline.config.settings import ComputeConfig, LaunchConfig, TrainConfig, check_values
from paceline.rank.world import World
from paceline.train.compute_settings import set_threads
from paceline.train.prepare import _choose_precision

CPU = torch.device("cpu")

TASK = """
import time
import torch
from torch import nn
from paceline import ArrayDataset, Task

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.03)
        return torch.ones(4), 0.0

def loss(outputs, targets):
    return (outputs[:, 0] - targets).square()

def model():
    return nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.2), nn.Linear(32, 1))

def data(split):
    torch.manual_seed(3)
    return ArrayDataset(torch.randn(64, 4), torch.randn(64))

task = Task(model, data, loss)
slow = Task(model, lambda split: Slow() if split == "train" else data(split), loss)
"""


def threads_taken(rank: int, world_size: int, asked: int) -> list[object]:
    world = World(rank, world_size, rank, world_size, CPU, "gloo")
    before = set_threads(None, world), torch.get_num_threads()  # OMP_NUM_THREADS of run_ranks is 1
    return [*before, set_threads(asked, world), torch.get_num_threads()]


@pytest.mark.ranks
def test_all_ranks_are_told_the_same_of_their_threads_and_what_was_asked_for_stays(tmp_path):
    asked = 2 * len(os.sched_getaffinity(0))
    expected = [
        thread_warnings([current_cpu_allocation(1)] * 2),
        1,
        thread_warnings([current_cpu_allocation(asked)] * 2),
        asked,
    ]
    assert run_ranks(threads_taken, 2, tmp_path, asked) == [expected, expected]
    assert expected[2] != []


@pytest.mark.parametrize(
    ("told", "precision", "words"),
    [
        ([["", {"fp32": 1.0, "bf16": 0.5}]] * 2, "bf16", "2.00 times as fast"),
        ([["", {"fp32": 1.0, "bf16": 0.99}]], "fp32", "1.01 times as fast"),
        ([["", {"fp32": 1.0, "bf16": 0.5}], ["", {"fp32": 1.0, "bf16": 1.5}]], "fp32", "0.67 times"),  # all wait for it
        ([["", {"fp32": 1.0, "bf16": 0.5}], ["it is old", {}]], "fp32", "because on rank 1 it is old"),
    ],
)
def test_auto_takes_bf16_only_where_it_is_faster_for_all(told, precision, words):
    chosen, notice = _choose_precision(told)
    assert chosen == precision and words in notice


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_a_chosen_precision_is_written_down_and_stays_on_a_resume(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    common = ("--batch-size", 8, "--checkpoint-every", 2, "--run-dir", "run")
    run = paceline("train", "mine.py:task", "--steps", 4, "--precision", "auto", *common)
    assert run.returncode == 0, run.stderr
    assert "--precision auto: " in run.stdout
    chosen = json.loads((tmp_path / "run/summary.json").read_text())["precision"]
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["compute"]["precision"] == chosen
    other = {"fp32": "bf16", "bf16": "fp32"}[chosen]
    again = ("train", "--resume", "auto", "--run-dir", "run", "--steps", 6, "--allow-change")
    run = paceline(*again, "steps", "--precision", other)
    ended_with(run, "another-run")
    assert f"precision: {chosen}" in run.stderr
    run = paceline(*again, "steps", "--precision", "auto")  # does not choose anew
    assert run.returncode == 0, run.stderr
    assert "--precision auto" not in run.stdout and start_steps(tmp_path / "run") == [0, 4]


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_what_a_run_waited_for_and_how_it_was_computed_is_told_and_written_down(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    fast = ("--precision", "fp32" if bf16_unsupported_reason(CPU) else "bf16")
    for task, flags in (("slow", ()), ("task", fast)):
        run = paceline("train", f"mine.py:{task}", "--epochs", 1, "--batch-size", 4, "--run-dir", task, *flags)
        assert run.returncode == 0, run.stderr
        summary = json.loads((tmp_path / task / "summary.json").read_text())
        told = summary["data_share"] >= 0.1  # on a busy machine the other one may wait, too: then it is told as well
        assert ("waited for data" in run.stdout) == told
        if task == "slow":
            assert told and "Try: " in run.stdout and "__getitems__" in run.stdout
        assert 50 << 20 < summary["peak_memory_bytes"] < 1 << 40 and summary["allocator"] in ("tuned", "system")
        assert ["--precision", summary["precision"]] == list(flags or ("--precision", "fp32"))
        assert ("compute: forward" in run.stdout) == ("bf16" in flags)


@pytest.mark.slow
def test_bf16_is_refused_where_the_processor_has_it_not(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    run = paceline("train", "mine.py:task", "--steps", 2, "--precision", "bf16", env={"ATEN_CPU_CAPABILITY": "avx2"})
    ended_with(run, "precision-not-there")


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_computing_again_changes_no_bit_of_a_run(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    digests = set()
    for folder, more in (("a", ()), ("b", ("--checkpoint-activations", "0,1"))):
        run = paceline("train", "mine.py:task", "--steps", 5, "--batch-size", 4, "--virtual-ranks", 2,
                       "--strategy", "exact", "--run-dir", folder, *more)  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert ("activation checkpointing of 0,1" in run.stdout) == bool(more)
        digests.add(json.loads((tmp_path / folder / "summary.json").read_text())["weights_sha256"])
    assert len(digests) == 1
    run = paceline("train", "mine.py:task", "--checkpoint-activations", "0,blocks.*")
    ended_with(run, "no-such-module")
    assert "'blocks.*'" in run.stderr and "0 (Linear), 1 (Dropout)" in run.stderr


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_verify_finds_what_is_computed_again_equal_to_one_process_that_keeps_it(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    run = paceline("verify", "mine.py:task", "--ranks", "1", "--strategies", "single", "--optimizers", "sgd",
                   "--checkpoint-activations", "0,1")  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("strategy", "compute", "code"),
    [
        ("exact", {"compile": True}, "exact-with-compile"),
        ("zero", {"cuda_graphs": True}, "exact-with-cuda-graphs"),
        ("fsdp", {"cuda_graphs": True}, "cuda-graphs-with-moved-weights"),
        ("dp", {"cuda_graphs": True}, "cuda-graphs-with-moved-weights"),
        ("ddp", {"cuda_graphs": True}, "cuda-graphs-with-hooks"),
        (None, {"compile": True, "checkpoint_activations": "a"}, "compile-with-recomputation"),
        (None, {"cuda_graphs": True, "compile": True}, "cuda-graphs-with-compile"),
        (None, {"cuda_graphs": True, "checkpoint_activations": "a"}, "cuda-graphs-with-recomputation"),
        (None, {"cuda_graphs": True}, "cuda-graphs-with-cpu"),
        (None, {"checkpoint_activations": "a,"}, "nothing-to-recompute"),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_starts(strategy, compute, code):
    launch = LaunchConfig(device="cpu" if code.endswith("cpu") else "auto")
    with raises(code):
        check_values(TrainConfig(strategy=strategy, compute=ComputeConfig(**compute), launch=launch))
