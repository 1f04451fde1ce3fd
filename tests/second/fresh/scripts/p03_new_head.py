"""Pretrains an encoder with many classes, then goes on with a new head for the real task."""
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

DIM, COARSE, FINE, BATCH = 10, 3, 12, 16


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(DIM, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.body(x))


class Source:
    """An endless stream, another one on each rank."""

    def __init__(self, rank):
        self.g = torch.Generator().manual_seed(1000 + rank)
        w = torch.Generator().manual_seed(1)
        self.fine = torch.randn(DIM, FINE, generator=w)
        self.coarse = torch.randn(DIM, COARSE, generator=w)

    def batch(self, table):
        x = torch.randn(BATCH, DIM, generator=self.g)
        return x, (x @ table).argmax(1)


def fit(model, source, table, steps, lr, name):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(steps):
        x, y = source.batch(table)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.02)
        if step % 25 == 0 and dist.get_rank() == 0:
            print(f"{name} {step:3d} {loss.item():.4f}", flush=True)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    # without find_unused_parameters the second phase stops with an error
    model = DDP(Net(FINE), find_unused_parameters=True)
    source = Source(dist.get_rank())
    fit(model, source, source.fine, 40, 5e-3, "pretrain")

    model.module.head = nn.Linear(24, COARSE)
    fit(model, source, source.coarse, 110, 2e-3, "finetune")

    if dist.get_rank() == 0:
        n = sum(p.numel() for p in model.parameters())
        print(f"done, {n} parameters", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
