"""A loop that is killed, stopped, or fails: python killed.py FOLDER [STEP kill|term|raise|early] [EVERY]."""

import os
import signal
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import paceline

folder, step, how, every = [*sys.argv[1:], *[None] * 4][:4]
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 6), torch.randint(0, 3, (96,)))
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
beside = nn.Linear(6, 3)

s = paceline.session(
    folder, resume=True, strategy="exact", virtual_ranks=6, checkpoint_every=int(every) if every else None
)
model, optimizer, scheduler = s.prepare(
    net, torch.optim.AdamW(net.parameters(), lr=1e-2), lambda o: ReduceLROnPlateau(o, patience=0)
)
other, optimizer_2 = s.prepare(beside, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
train = s.loader(DataLoader(data, batch_size=12, shuffle=True))
for _ in s.epochs(3):
    for x, y in train:
        optimizer.zero_grad()
        s.backward(F.cross_entropy(model(x) + other(x), y))
        if how == "early" and s.last and s.step + 1 == int(step):
            raise ValueError("mine")
        optimizer.step()
        optimizer_2.step()
        optimizer_2.zero_grad()  # others do it here
        if step and how != "early" and s.last and s.step + 1 == int(step) and s.rank == s.size - 1:
            if how == "raise":
                raise ValueError("mine")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)
    model.eval()
    other.eval()
    lost = seen = 0.0
    with torch.no_grad():
        for x, y in s.loader(DataLoader(data, batch_size=32)):
            lost += float(F.cross_entropy(model(x) + other(x), y, reduction="sum"))
            seen += len(y)
    model.train()
    other.train()
    scheduler.step(round(s.mean(lost, seen), 3))
    s.log(loss=s.mean(lost, seen))
    s.saved.setdefault("losses", []).append(round(s.mean(lost, seen), 3))
    if s.rank == 0 and len(s.saved["losses"]) == 3:
        print("losses", s.saved["losses"])
