"""Counts what a step costs the host: Python calls and torch operations per step, in a plain loop or in a session."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import paceline

FIRST, STEPS = 10, 24  # the first steps check more, also 32 and 33


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def steps(kind: str) -> Iterator[None]:
    torch.manual_seed(0)
    inputs = torch.randn(64 * 40, 20)
    model: Any = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if kind == "plain":
        for batch in torch.randperm(len(inputs)).split(64):
            x, y = inputs[batch], inputs[batch, :1]
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            yield
        return
    s = paceline.session()
    model, optimizer = s.prepare(model, optimizer)
    loader = s.loader(DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=64, shuffle=True))
    for _ in s.epochs(1):
        for x, y in loader:
            optimizer.zero_grad()
            s.backward(F.mse_loss(model(x), y))
            optimizer.step()
            yield


def counted(kind: str) -> dict[str, float]:
    calls, waiting, running = 0, False, steps(kind)
    for _ in range(FIRST):
        next(running)

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, waiting
        if frame.f_code.co_name == "_sleep_until":  # waits for another rank, which depends on the load of the machine
            waiting = event != "return"
        calls += event == "call" and not waiting

    sys.setprofile(note)
    fewest = 10**9  # of all steps: some do more, for example a step that finds garbage
    for _ in range(STEPS):
        calls = 0
        next(running)
        fewest = min(fewest, calls)
    sys.setprofile(None)
    with Operations() as operations:
        for _ in range(4):
            next(running)
    return {"calls": fewest, "operations": operations.count / 4}


if __name__ == "__main__":
    Path(f"{sys.argv[1]}-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(counted(sys.argv[1])))
