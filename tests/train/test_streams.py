"""`paceline train` on a stream: torch's own result, the same bits on every number of ranks, stopped or not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.ended import start_steps
from tests.errors import ended_with, raises
from torch.utils.data import DataLoader

from paceline.cli import ledger
from paceline.config.settings import BatchSizes, TrainConfig
from paceline.data.loader import LoadingOptions
from paceline.rank.world import World
from paceline.seeding import derive_seed, fork_rng_with_seed
from paceline.train.prepare import make_data_stream

TASK = """
import os, signal
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset, TensorDataset
from paceline import Task
from paceline.train.records import RunRecorder

class Counted(IterableDataset):  # has no state: its position is counted
    def __iter__(self):
        for number in range(39):
            drawn = torch.Generator().manual_seed(number)
            x = torch.randn(4, generator=drawn, dtype=torch.float64)
            yield x + NOISE * torch.randn(4), (x.sum() > 0).long()

class Stateful(Counted):
    at = 0

    def __iter__(self):
        for found in list(super().__iter__())[self.at :]:
            self.at += 1
            yield found

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

class Onward(Counted):  # a second reading goes on where the first has ended
    reading = None

    def __iter__(self):
        self.reading = self.reading or super().__iter__()
        return self.reading

NOISE = 0.0
test = TensorDataset(torch.ones(7, 4, dtype=torch.float64), torch.ones(7).long())

def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()

def noisy_model():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 2))

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")

def stop(moment):  # once: after a resume that step does not come again
    if moment.step == 7 and moment.rank == moment.world_size - 1 and "STOPS" in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def die(moment):  # after the update of the next step, before the rank records it
    if moment.step == 3 and moment.rank == 1:
        RunRecorder.log_step = kill

def made(train, make_model=model, **more):
    return Task(make_model, lambda split: train() if split == "train" else test, loss, on_step=stop, **more)

task = made(Counted)
scheduled = made(Counted, make_schedule=lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1.0))
killed = Task(model, lambda split: Counted() if split == "train" else test, loss, on_step=die)
stream_to_judge = Task(model, lambda split: Counted(), loss)

def noisy(kind="Counted"):
    global NOISE, test
    NOISE, test = 0.1, TensorDataset(torch.ones(7, 4), torch.ones(7).long())
    kinds = {"Counted": Counted, "Stateful": Stateful, "Onward": Onward}

    def collate(samples):
        found = torch.utils.data.default_collate(samples)
        return found[0].float(), found[1]

    return made(kinds[kind], noisy_model, collate=collate)
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "streamed_task.py"
    path.write_text(TASK)
    return path


def executed() -> dict[str, Any]:
    module: dict[str, Any] = {}
    exec(TASK, module)
    return module


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_two_passes_give_what_a_plain_loop_gives_and_the_tail_is_weighted_right(
    paceline, task_file: Path, tmp_path: Path
) -> None:
    flags = ("--virtual-ranks", 3, "--global-batch", 8, "--epochs", 2, "--schedule", "constant", "--run-dir", "run")
    sgd = ("--optimizer", "sgd", "--momentum", 0, "--weight-decay", 0, "--lr", 0.5)
    done = paceline("train", f"{task_file}:task", *flags, *sgd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "; 2 epochs" in done.stdout
    found = summary(tmp_path / "run")
    assert (found["steps"], found["samples_seen"]) == (10, 78)
    module = executed()
    with fork_rng_with_seed(derive_seed(0, "model"), torch.device("cpu")):
        model = module["model"]()
    for _ in range(2):
        for inputs, targets in DataLoader(module["Counted"](), batch_size=8):
            model.zero_grad()
            module["loss"](model(inputs), targets).mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.5 * parameter.grad
    for name, tensor in load_file(tmp_path / "run/model.safetensors").items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-12, atol=1e-13)


CONFIG = TrainConfig(task="streamed_task.py:task")


@pytest.mark.parametrize(
    ("change", "code", "fields"),
    [
        ({}, "stream-schedule-without-steps", {"value": "cosine"}),
        ({"data": replace(CONFIG.data, last_batch="pad")}, "stream-cannot-be-padded", {}),
        ({"data": replace(CONFIG.data, num_workers=2)}, "stream-in-several-processes", {"value": 2}),
        ({"model": replace(CONFIG.model, batchnorm="sync")}, "stream-with-sync-batchnorm", {}),
        ({"task": "scheduled"}, "schedule-without-length", {}),
        ({"data_are": iter([1])}, "not-a-dataset", {"kind": "list_iterator"}),
        ({"data_are": DataLoader([1])}, "not-a-dataset", {"kind": "DataLoader"}),
        ({"data_are": 3}, "not-a-dataset", {"kind": "int"}),
    ],
)
def test_what_no_stream_can_have_is_refused_by_name(change: dict[str, Any], code: str, fields: dict[str, Any]) -> None:
    change = dict(change)
    task, data = executed()[change.pop("task", "task")], change.pop("data_are", None)
    world, loading = World(0, 1, 0, 1, torch.device("cpu"), "gloo"), LoadingOptions(torch.device("cpu"))
    data = task.make_dataset("train") if data is None else data
    with raises(code, **fields):
        make_data_stream(replace(CONFIG, **change), task, data, BatchSizes(8, 2, 1), loading, world)
    longer = replace(CONFIG, run=replace(CONFIG.run, steps=9))  # then the schedules know their end
    assert (
        make_data_stream(
            longer, task, task.make_dataset("train"), BatchSizes(8, 2, 1), loading, world
        ).plan.known_steps_per_epoch
        == 0
    )


def test_streams_that_cannot_be_read_again_or_are_to_be_judged_are_refused_before_the_first_step(
    paceline, task_file: Path
) -> None:
    for name, code in (("noisy", "stream-not-repeatable"), ("stream_to_judge", "evaluation-of-stream")):
        chance = ("--task-arg", "kind=Onward") if name == "noisy" else ()
        ended_with(paceline("train", f"{task_file}:{name}", "--steps", 3, *chance), code)


EXACT = (
    "--strategy", "exact", "--virtual-ranks", 3, "--global-batch", 12, "--schedule", "constant", "--epochs", 3,
    "--last-batch", "drop",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("kind", ["Counted", pytest.param("Stateful", marks=pytest.mark.soak)])
def test_every_number_of_ranks_comes_to_the_same_bits_also_stopped_in_a_pass_and_resumed_on_another(
    paceline, task_file: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = (f"{task_file}:noisy", "--task-arg", f"kind={kind}")
    digests: set[str] = set()
    for ranks in (1, 3):
        done = paceline("train", *task, *EXACT, "--run-dir", f"run-{ranks}", ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        digests.add(summary(tmp_path / f"run-{ranks}")["weights_sha256"])
    first = (*task, *EXACT, "--run-dir", "stopped")
    assert paceline("train", *first, env={"STOPS": "1"}, ranks=3).returncode == 75
    done = paceline("train", *first, "--resume", "auto", "--num-workers", 1, ranks=2)
    assert done.returncode == 0 and start_steps(tmp_path / "stopped")[-1] == 8, done.stdout + done.stderr
    assert {summary(tmp_path / "stopped")["weights_sha256"]} == digests
    assert ledger.main([str(tmp_path / "stopped"), "--json", str(tmp_path / "used.json")]) == 0
    assert [one["once"] for one in json.loads((tmp_path / "used.json").read_text())["epochs"]] == [36] * 3
    capsys.readouterr()


def test_a_step_that_a_killed_rank_has_not_recorded_is_proven(paceline, task_file: Path, tmp_path: Path) -> None:
    options = ("--global-batch", 8, "--epochs", 1, "--schedule", "constant", "--run-dir", "run")
    done = paceline("train", f"{task_file}:killed", *options, "--checkpoint-every", 100, ranks=2)
    assert done.returncode == 137, done.stdout + done.stderr
    done = paceline("train", f"{task_file}:killed", *options, "--resume", "auto", ranks=2)
    assert done.returncode == 0 and start_steps(tmp_path / "run")[-1] == 4, done.stdout + done.stderr
    assert ledger.main([str(tmp_path / "run"), "--json", str(tmp_path / "used.json")]) == 0
    used = json.loads((tmp_path / "used.json").read_text())
    assert [(epoch["once"], epoch["never"], epoch["repeatedly"]) for epoch in used["epochs"]] == [(39, 0, 0)]


@pytest.mark.slow
def test_the_last_pass_ends_the_run_a_finished_one_is_judged_and_steps_may_take_several_passes(
    paceline, task_file: Path, tmp_path: Path
) -> None:
    task = (f"{task_file}:task", "--global-batch", 8, "--steps", 12, "--eval-every", 4, "--run-dir", "run")
    done = paceline("train", *task)
    assert done.returncode == 0 and "; 12 steps in all" in done.stdout, done.stdout + done.stderr
    judged = [line.split()[3] for line in done.stdout.splitlines() if line.startswith("test after step")]
    assert judged == ["4:", "5:", "8:", "10:", "12:"]  # a pass is 5 steps
    assert summary(tmp_path / "run")["samples_seen"] == 2 * 39 + 16
