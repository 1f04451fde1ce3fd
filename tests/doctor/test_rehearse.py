"""The ranks of the rehearsal measure a real task; they end with the launcher, and their failures are told."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from paceline.doctor import messages as m
from paceline.doctor.network import free_port
from paceline.doctor.session import PROGRAM, HostProgram, ask_hosts, host_programs
from paceline.launch.job import Command

pytestmark = [pytest.mark.ranks, pytest.mark.sample(2)]
COMMAND = Command("n1", (sys.executable, *PROGRAM))

TASK = """
import torch
from torch.utils.data import TensorDataset
import paceline

print("x" * 100_000)  # a task may say what it likes

def make_dataset(split):
    return TensorDataset(torch.randn(3, 10), torch.tensor([0, 1, 2]))  # fewer samples than a batch

def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

task = paceline.Task(lambda: torch.nn.Linear(10, 3), make_dataset, loss)
"""


def rehearsal(folder: Path, task: str, workers: int = 1) -> m.Rehearse:
    return m.Rehearse(
        first_rank=0,
        workers=workers,
        world_size=workers,
        address="127.0.0.1",
        port=free_port(),
        interface="",
        threads=1,
        task=task,
        options={},
        batch_size=8,
        cwd=str(folder),
        seconds=50.0,
    )


def rehearse(request: m.Rehearse) -> m.Rehearsed:
    with host_programs([COMMAND]) as opened:
        found = ask_hosts(opened, {"n1": request}, m.Rehearsed, 55.0)
        assert found, opened[0].lost
        return found["n1"]


def test_a_task_that_prints_is_measured_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(TASK)
    found = rehearse(rehearsal(tmp_path, f"{tmp_path}/noisy.py:task", workers=2))
    assert found.why == ""
    assert found.device == "cpu" and len(found.step_seconds_of) == 2
    assert (found.parameters, found.gradient_bytes) == (33, 132)
    assert found.step_seconds > 0
    assert found.bytes_per_second == pytest.approx(found.gradient_bytes / found.reduce_seconds)


def test_a_task_that_fails_is_told_by_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import sys\nprint('y' * 200000, file=sys.stderr)\nraise KeyError('no data')\n")
    found = rehearse(rehearsal(tmp_path, f"{tmp_path}/broken.py:task"))
    assert found.why == "a rank ended with exit code 1: KeyError: 'no data'"


@pytest.mark.parametrize("empty", ["TensorDataset(torch.randn(0, 10), torch.ones(0))", "Nothing()"])
def test_empty_data_are_told_as_what_they_are(tmp_path: Path, empty: str) -> None:
    data = "TensorDataset(torch.randn(3, 10), torch.tensor([0, 1, 2]))  # fewer samples than a batch"
    stream = "class Nothing(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        return iter(())\n"
    assert data in TASK
    (tmp_path / "empty.py").write_text(
        TASK.replace(data, empty).replace("def make_dataset", f"{stream}\ndef make_dataset")
    )
    found = rehearse(rehearsal(tmp_path, f"{tmp_path}/empty.py:task"))
    assert found.why == "a rank ended with exit code 1: the training data are empty"


def test_a_working_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert "none does not exist here" in rehearse(rehearsal(tmp_path / "none", "mnist-cnn")).why


def test_ranks_that_wait_end_when_the_launcher_goes_away(tmp_path: Path) -> None:
    waiting = msgspec.structs.replace(rehearsal(tmp_path, ""), world_size=2)  # the second one never comes
    session = HostProgram(replace(COMMAND))
    session.send(waiting)
    host = psutil.Process(session._process.pid)  # pyright: ignore
    deadline = time.monotonic() + 10
    while not (ranks := host.children()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ranks
    assert session._process and session._process.stdin
    session._process.stdin.close()
    assert not psutil.wait_procs([host, *ranks], timeout=5)[1]
    session.end()
