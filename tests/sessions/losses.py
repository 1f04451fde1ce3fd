"""Losses that are no mean over samples, as docs/own-loop.md says to write them: `losses.py KIND`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader

import paceline

torch.set_default_dtype(torch.float64)


class Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(38 if sys.argv[1] == "kept" else 36, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], i


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.2])
Backward = Callable[..., None]


def plain(loss: Tensor, weight: Tensor | None = None, **_: str) -> None:
    loss.backward()


def classes(model: nn.Module, x: Tensor, i: Tensor, backward: Backward) -> None:
    targets = (i * i) % 3
    backward(F.cross_entropy(model(x), targets, weight=CLASS_WEIGHTS), weight=CLASS_WEIGHTS[targets].sum())


def crops(model: nn.Module, x: Tensor, i: Tensor, backward: Backward) -> None:
    outputs = model(torch.cat([x, -x, 2 * x]))
    backward(outputs.square().mean())


def rows(model: nn.Module, x: Tensor, i: Tensor, backward: Backward) -> None:
    outputs = model(torch.repeat_interleave(x, i % 4 + 1, 0))
    backward(outputs.square().mean(), weight=len(outputs))


def summed(model: nn.Module, x: Tensor, i: Tensor, backward: Backward) -> None:
    backward(model(x).square().sum() / 100, reduction="sum")


def penalty(model: nn.Module, x: Tensor, i: Tensor, backward: Backward) -> None:
    backward(model(x).square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters()))


def kept(model: nn.Module, x: Tensor, i: Tensor, backward: Backward) -> None:
    backward(model(x).square().mean().reshape(1))


def contrastive(model: nn.Module, x: Tensor, i: Tensor, backward: Backward) -> None:
    """Each row is to be near the one with noise, and far from all others of the batch."""
    own, noisy = (F.normalize(model(one)) for one in (x, x + 0.1 * x.flip(1)))
    everything, first = noisy, 0
    if backward is not plain and dist.get_world_size() > 1:
        everything = torch.cat(all_gather(noisy))
        first = dist.get_rank() * len(x)
    targets = torch.arange(first, first + len(x))
    backward(F.cross_entropy(own @ everything.T * 5, targets))


KINDS = {one.__name__: one for one in (classes, crops, rows, summed, penalty, kept, contrastive)}


def sam(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, backward: Backward) -> None:
    optimizer.zero_grad()
    backward(model(x).square().mean())
    moved = [0.1 * p.grad for p in model.parameters()]
    with torch.no_grad():
        for parameter, by in zip(model.parameters(), moved, strict=True):
            parameter.add_(by)
    optimizer.zero_grad()
    backward(model(x).square().mean())
    with torch.no_grad():
        for parameter, by in zip(model.parameters(), moved, strict=True):
            parameter.sub_(by)
    optimizer.step()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, i: Tensor, backward: Backward) -> None:
    if sys.argv[1] == "sam":
        return sam(model, optimizer, x, backward)
    optimizer.zero_grad()
    KINDS[sys.argv[1]](model, x, i, backward)
    optimizer.step()
    return None


wanted = net()
optimizer = torch.optim.SGD(wanted.parameters(), 0.05)
for x, i in DataLoader(Rows(), batch_size=12):
    step(wanted, optimizer, x, i, plain)
with paceline.session() as s:
    model, optimizer = s.prepare(net(), lambda p: torch.optim.SGD(p, 0.05))
    for x, i in s.loader(Rows(), global_batch=12, shuffle=False):
        step(model, optimizer, x, i, s.backward)
    apart = max(
        float((p - q).abs().max() / q.abs().max()) for p, q in zip(model.parameters(), wanted.parameters(), strict=True)
    )
    s.main(Path("found.json").write_text, json.dumps(apart))
