"""What `compare` and `scale` measure on: as many samples as the batches that are named, of streams, too, or nothing."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.errors import raises

from paceline.config.settings import TrainConfig
from paceline.lab.measurement import NO_EXCHANGE, Candidate
from paceline.lab.ranks.measure import MAX_STREAM_SAMPLES, CandidateTraining, load_workload
from paceline.rank.world import World
from paceline.train.step import ignore_phase

TASK = """
import torch
from torch import nn
from torch.utils.data import IterableDataset
from paceline import ArrayDataset, Task

class Numbers(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter([(torch.ones(4), torch.tensor(number % 2)) for number in range(self.count)])

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")

def on(make):
    return Task(lambda: nn.Linear(4, 2), lambda split: make(), loss)

stream = on(lambda: Numbers(10_000))
short = on(lambda: Numbers(100))
empty = on(lambda: Numbers(0))
reader = on(lambda: iter(Numbers(10_000)))
few = on(lambda: ArrayDataset(torch.ones(100, 4), torch.ones(100).long()))
none = on(lambda: ArrayDataset(torch.ones(0, 4), torch.ones(0).long()))
"""
ALONE = World(0, 1, 0, 1, torch.device("cpu"), "gloo")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    path = tmp_path_factory.mktemp("task") / "measured_here.py"
    path.write_text(TASK)
    return TrainConfig(task=f"{path}:stream")


def candidates(*batches: int) -> list[Candidate]:
    return [Candidate(f"alone-b{batch}", NO_EXCHANGE, batch, 1) for batch in batches]


def test_a_step_of_a_stream_has_as_many_samples_as_it_is_named_for(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch sets it where an optimizer is made
    largest = MAX_STREAM_SAMPLES + 1000
    named = candidates(64, largest)
    workload = load_workload(config, named, ALONE)
    (note,) = workload.notes
    assert f"first {largest:,} samples" in note
    for one in named:
        with closing(CandidateTraining(workload, one, tmp_path / one.name, 2, ignore_phase)) as training:
            plan = training.plan
            sizes = [len(plan.global_indices(*divmod(step, plan.steps_per_epoch))) for step in range(2)]
            assert sizes == [one.batch_size] * 2
    assert len(load_workload(config, candidates(64), ALONE).dataset) == MAX_STREAM_SAMPLES  # pyright: ignore


@pytest.mark.parametrize(
    ("task", "code", "fields"),
    [
        ("empty", "measure-no-data", {}),
        ("none", "measure-no-data", {}),
        ("short", "measure-too-few-samples", {"needed": 128, "samples": 100}),
        ("few", "measure-too-few-samples", {"needed": 128, "samples": 100}),
        ("reader", "not-a-dataset", {"kind": "list_iterator", "why": "can be read once"}),
    ],
)
def test_data_on_which_no_batch_of_that_size_can_be_measured_are_refused(
    config: TrainConfig, task: str, code: str, fields: dict[str, Any]
) -> None:
    config = replace(config, task=str(config.task).replace(":stream", f":{task}"))
    with raises(code, **fields):
        load_workload(config, candidates(64, 128), ALONE)
    if task in ("short", "few"):
        workload = load_workload(config, candidates(64, 100), ALONE)
        assert len(workload.dataset) == 100  # pyright: ignore


def test_several_loader_processes_for_a_stream_are_refused_as_in_training(config: TrainConfig) -> None:
    config = replace(config, data=replace(config.data, num_workers=2))
    with raises("stream-in-several-processes", value=2):
        load_workload(config, candidates(64), ALONE)
    one = replace(config, data=replace(config.data, num_workers=1))
    assert load_workload(one, candidates(64), ALONE).notes
