"""The order of samples, the random streams and the settings of a session are those of the plain loop's DataLoader."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.run_script import run_script
from torch.utils.data import DataLoader, TensorDataset

from paceline.data.loader import LoadingOptions
from paceline.sessions.loader import adopt_worker_settings
from paceline.sessions.order import EpochBatches

SCRIPT = Path(__file__).with_name("draws.py")


@pytest.mark.parametrize("count", [40, 43])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["sequential", "shuffled", "with a generator"])
def test_batches_and_draws_are_those_of_the_dataloader(kind: str, drop_last: bool, count: int) -> None:
    generator = torch.Generator()

    def epoch(next_batch: Callable[[DataLoader[Any]], Callable[[], Any]]) -> list[Any]:
        torch.manual_seed(3)
        generator.manual_seed(5)
        given = generator if kind == "with a generator" else None
        data = TensorDataset(torch.arange(count))
        take = next_batch(
            DataLoader(data, batch_size=8, shuffle=kind != "sequential", drop_last=drop_last, generator=given)
        )
        found: list[Any] = []
        while True:
            batch = take()
            found.append((batch, torch.get_rng_state().tolist(), generator.get_state().tolist()))
            if batch is None:
                return found

    def plain(loader: DataLoader[Any]) -> Callable[[], Any]:
        batches = iter(loader)
        return lambda: None if (batch := next(batches, None)) is None else batch[0].tolist()

    def ordered(loader: DataLoader[Any]) -> Callable[[], Any]:
        order, numbers = EpochBatches(loader), iter(range(100))
        return lambda: order.batch_indices(n).tolist() if order.has_batch(n := next(numbers)) else None

    assert epoch(ordered) == epoch(plain)


def test_draws_outside_of_steps_are_those_of_a_program_without_steps(tmp_path: Path) -> None:
    done = run_script(1, SCRIPT, "plain", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run_script(1, SCRIPT, "session", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "session.json").read_text()) == json.loads((tmp_path / "plain.json").read_text())


def test_a_resume_continues_the_streams_of_the_last_checkpoint(tmp_path: Path) -> None:
    for number, kind in enumerate(("whole", "stopped", "resumed")):
        done = run_script(1, SCRIPT, kind, cwd=tmp_path)
        assert done.returncode == (3 if number == 1 else 0), done.stdout + done.stderr
    assert json.loads((tmp_path / "resumed.json").read_text()) == json.loads((tmp_path / "whole.json").read_text())


# ---- settings of loader processes -----------------------------------------------------------------------------------

SLOW_LOADER = """
import time
import torch
from torch.utils.data import DataLoader, Dataset
import paceline

class Slow(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        time.sleep(3)
        return index

with paceline.session() as s, torch.no_grad():
    for batch in s.loader(DataLoader(Slow(), batch_size=1, num_workers=1, timeout=1)):
        print("came")
"""


def test_the_settings_of_its_processes_are_taken_over() -> None:
    data = TensorDataset(torch.ones(2))
    existing = DataLoader(data, num_workers=1, timeout=1, prefetch_factor=3, multiprocessing_context="spawn")
    found = adopt_worker_settings(existing, LoadingOptions(torch.device("cpu"))).workers
    assert (found["timeout"], found["prefetch_factor"]) == (1, 3)
    assert found["multiprocessing_context"].get_start_method() == "spawn"


@pytest.mark.slow
def test_its_timeout_ends_a_wait(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLOW_LOADER)
    done = warm.run(("mine.py",), cwd=tmp_path)
    assert (done.returncode, "timed out after 1 " in done.stderr) == (1, True), done.stdout + done.stderr
