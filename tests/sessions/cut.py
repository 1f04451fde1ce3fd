"""A loop that adds up the gradients of two batches: python cut.py FOLDER STRATEGY [STEP raise|kill|term]."""

import os
import signal
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import paceline

folder, strategy, step, how, *_ = [*sys.argv[1:], None, None]

torch.manual_seed(0)
data = TensorDataset(torch.randn(85, 6).double(), torch.randint(0, 3, (85,)))
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
beside = nn.Linear(6, 3).double()

s = paceline.session(folder, resume=True, strategy=str(strategy), virtual_ranks=6, checkpoint_every=3)
model, optimizer, scheduler = s.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), lambda o: StepLR(o, 2, 0.8))
other, optimizer_2 = s.prepare(beside, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
train = s.loader(data, global_batch=9)
for _ in s.epochs(2):
    for x, y in train:
        s.backward(F.cross_entropy(model(x) + other(x), y))
        if s.batch % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer_2.step()
            scheduler.step()
            optimizer.zero_grad()
            optimizer_2.zero_grad()
        if step and s.last and s.step + 1 == int(step) and s.rank == s.size - 1:
            if how == "raise":
                raise ValueError("mine")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)
