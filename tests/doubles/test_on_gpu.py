"""Complete commands on the GPU in Python: train, checkpoint, resume on a different number of ranks, verify."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.doubles import gpu
from tests.ended import digest, start_steps

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(540)]

TASK = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, default_collate

from paceline import Task


class Rows(Dataset):
    def __init__(self, split):
        self.rows = torch.randn(121, 4, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], index % 3


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


task = Task(
    make_model=model, make_dataset=Rows, collate=lambda samples: default_collate(samples),
    loss=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"),
)
"""


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = [str(ROOT / "src"), str(ROOT), str(ROOT / "tests" / "doubles" / "site_gpu")]
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        text=True, capture_output=True, timeout=450, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def paceline(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(TASK)
    return python(folder, "-m", "paceline", *words)


def test_a_training_is_the_same_on_one_rank_and_two_resumed_on_three_and_with_loader_processes(tmp_path: Path) -> None:
    common = ("--strategy", "exact", "--virtual-ranks", "3", "--batch-size", "4", "--backend", "gloo")
    train = ("train", "mine.py:task", *common, "--steps")
    paceline(tmp_path, *train, "8", "--run-dir", "two", "--nproc", "2")
    kept = ("--checkpoint-every", "2", "--keep-checkpoints", "9", "--num-workers", "2")
    one = paceline(tmp_path, *train, "8", "--run-dir", "three", *kept)
    assert f"1 process on {gpu.NAME}" in one.stdout and digest(tmp_path / "three") == digest(tmp_path / "two")
    (tmp_path / "three" / "checkpoints" / "step-00000008").rename(tmp_path / "gone")
    paceline(tmp_path, "train", "--resume", "auto", "--run-dir", "three", "--nproc", "3")
    assert start_steps(tmp_path / "three") == [0, 6]
    assert digest(tmp_path / "three") == digest(tmp_path / "two")


@pytest.mark.soak
def test_scale_measures_it_there_where_ranks_share_a_gpu(tmp_path: Path) -> None:
    how = ("--ranks", "1,2", "--backend", "gloo", "--mode", "weak", "--batch-size", "4", "--steps", "5")
    said = paceline(tmp_path, "scale", "mine.py:task", *how, "--warmup", "3", "--rounds", "1").stdout
    assert gpu.NAME in said and "2 ranks, weak: " in said


@pytest.mark.soak
def test_verify_proves_it_there_in_float64_and_to_the_bit(tmp_path: Path) -> None:
    common = ("verify", "mine.py:task", "--ranks", "1,2", "--device", "auto")
    equal = paceline(tmp_path, *common, "--strategies", "bucketed,zero", "--optimizers", "adamw")
    assert "equal one process" in equal.stdout
    bits = paceline(tmp_path, *common, "--bitwise", "--optimizers", "sgd")
    assert "bit-identical" in bits.stdout


@pytest.mark.soak
def test_verify_proves_a_loop_there(tmp_path: Path) -> None:
    loop = str(ROOT / "examples" / "classic" / "vae.py")
    proven = paceline(tmp_path, "verify", f"{loop}:main", "--ranks", "1,2", "--device", "auto")
    assert "equal one process" in proven.stdout and "bit-identical" in proven.stdout


SESSION = """
from dataclasses import dataclass

import torch
from torch import nn

import paceline


@dataclass
class Batch:
    x: torch.Tensor
    targets: dict
    names: list


def collate(samples):
    x = torch.stack([x for x, _ in samples])
    return Batch(x, {"y": [torch.tensor([float(y) for _, y in samples])]}, [str(y) for _, y in samples])


rows = [(torch.ones(4) * i, i) for i in range(8)]
with paceline.session(backend="gloo") as s:
    model = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))
    optimizer = torch.optim.Adagrad(model.parameters())  # has state from the start
    model, optimizer = s.prepare(model, optimizer)
    places = [*model.parameters(), *model.buffers(), *(state["sum"] for state in optimizer.state.values())]
    loader = s.loader(rows, global_batch=4, collate=collate)
    for epoch in s.epochs(1):
        for batch in loader:
            optimizer.zero_grad()
            places += [batch.x, batch.targets["y"][0]]
            assert batch.names == [str(int(y)) for y in batch.targets["y"][0].cpu()]
            s.backward((model(batch.x)[:, 0] - batch.targets["y"][0]).square().mean())
            optimizer.step()
assert len(places) == 4 + 3 + 4 + 4
print("placed on", {str(place.device) for place in places} - {str(s.device)} or s.device)
"""


def test_a_session_moves_the_model_and_nested_batches_to_the_device(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SESSION)
    assert f"placed on {gpu.NAME}:0" in python(tmp_path, "loop.py").stdout
