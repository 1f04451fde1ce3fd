"""Small tasks to be measured, some with one thing that makes them slow, or impossible for one strategy."""

import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline import ArrayDataset, Task

SLOW_GROUP = "SLOW_CPU_GROUP"
"""names the cgroup, with a quota of processor time, that the last rank of `limited` moves into"""
RANK = int(os.environ.get("RANK", "0"))
LAST = int(os.environ.get("WORLD_SIZE", "1")) - 1


def _data(split: str) -> ArrayDataset:
    generator = torch.Generator().manual_seed(len(split))
    return ArrayDataset(torch.randn(16384, 256, generator=generator), torch.zeros(16384))


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().mean(1)


def _layers(width: int, depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(256, width), *layers)


class _Slow(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Loaded one by one; takes its time on the last of several ranks."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if RANK == LAST > 0:
            time.sleep(0.01)
        return torch.full((256,), float(index)), torch.zeros(())


class _Tied(nn.Module):
    """Two parameters that are one memory, which zero must refuse to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(256, 256) / 16)
        self.two = nn.Parameter(self.one.detach().view(-1)[:256])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.one + self.two


def _niced() -> nn.Module:
    if RANK == LAST > 0:
        os.nice(10)
        with suppress(OSError):  # where the kernel groups by session, and every rank has one, it counts only within it
            Path("/proc/self/autogroup").write_text("10")
    return _layers(512, 4)


def _limited() -> nn.Module:
    if RANK == LAST > 0:
        Path(os.environ[SLOW_GROUP], "cgroup.procs").write_text(str(os.getpid()))
    return _layers(512, 4)


small = Task(lambda: _layers(64, 1), _data, _loss)
large = Task(lambda: _layers(512, 4), _data, _loss)
slow_data = Task(lambda: _layers(64, 1), lambda split: _Slow(4096 if split == "train" else 8), _loss)
tied = Task(_Tied, _data, _loss)
niced = Task(_niced, _data, _loss)
limited = Task(_limited, _data, _loss)
wide = Task(lambda: _layers(1536, 3), _data, _loss)  # 30 MB of gradients, little to compute for a few samples
