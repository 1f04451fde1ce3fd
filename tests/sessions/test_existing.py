"""What is taken over from an existing DataLoader. Its order is in test_equal.py, what is refused in test_wrong.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests import warm
from torch.utils.data import DataLoader, TensorDataset

from paceline.data.loader import LoadingOptions
from paceline.sessions.loader import adopt_worker_settings

SCRIPT = """
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
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = warm.run(("mine.py",), cwd=tmp_path)
    assert (done.returncode, "timed out after 1 " in done.stderr) == (1, True), done.stdout + done.stderr
