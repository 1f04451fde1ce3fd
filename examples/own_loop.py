"""Your own training loop on any number of processes.

python examples/own_loop.py                                 # a world of one
paceline launch --nproc 2 -- examples/own_loop.py           # two ranks, the same result; torchrun, srun do as well
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(1000, 20)
dataset = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))

with paceline.session() as s:
    model, optimizer, scheduler = s.prepare(net, lambda p: SGD(p, lr=0.05, momentum=0.9), lambda o: StepLR(o, 5, 0.7))
    train = s.loader(dataset, global_batch=64)
    for _ in s.epochs(20):
        for x, y in train:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)  # a mean, as ever
            s.backward(loss)
            optimizer.step()
        scheduler.step()
        model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for x, y in s.loader(dataset, global_batch=256):
                total += F.mse_loss(model(x), y, reduction="sum").item()
                count += len(x)
        model.train()
        s.log(loss=s.mean(total, count))
