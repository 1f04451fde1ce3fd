"""Draws random numbers inside and outside of steps: plain | session | whole | stopped | resumed."""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def draws() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def main(kind: str) -> list[list[float]]:
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))
    data = TensorDataset(torch.randn(80, 4))
    random.seed(1)
    np.random.seed(1)
    found = [draws()]
    if kind == "plain":
        return found + [draws() for _ in range(3)]
    saves = kind != "session"
    folder = ("one" if kind == "whole" else "two") if saves else None
    s = paceline.session(folder, resume=kind == "resumed", checkpoint_every=3 if saves else None)
    model, optimizer = s.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    # with a DataLoader, the order is drawn from the streams as well
    loader = s.loader(DataLoader(data, batch_size=8, shuffle=True)) if saves else s.loader(data, global_batch=8)
    for epoch in s.epochs(2):
        for number, (x,) in enumerate(loader):
            optimizer.zero_grad()
            s.backward(model(x).mean())
            optimizer.step()
            draws()
            if kind == "session" and epoch == 0 and number == 2:
                break
            if kind == "stopped" and s.step == 9:  # the newest checkpoint is that of step 6
                os._exit(3)
        found.append(draws())
    return found[-1:] if saves else [*found, draws()]


if __name__ == "__main__":
    Path(f"{sys.argv[1]}.json").write_text(json.dumps(main(sys.argv[1])))
