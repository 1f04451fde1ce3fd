#!/usr/bin/env python3
"""Local SGD: each rank goes four steps on its own, then the weights are averaged (post-local SGD without DDP)."""
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

PERIOD, STEPS, EPOCHS = 4, 24, 3


def log(rank, **row):
    with open(f"c04_rank{rank}.jsonl", "a") as f:  # one file a rank
        f.write(json.dumps(row) + "\n")


def sample(g, n=16):
    x = torch.rand(n, 2, generator=g) * 2 - 1
    return x, torch.hypot(x[:, 0], x[:, 1]).unsqueeze(1)


def check(model, rank):
    if rank != 0:
        return
    x, y = sample(torch.Generator().manual_seed(12345), 4000)  # always the same, and on rank 0 only
    model.eval()
    with torch.no_grad():
        print(f"error {nn.functional.l1_loss(model(x), y):.4f}")
    model.train()


def main():
    try:
        nice = int(os.environ["TRAIN_NICE"])
        os.nice(nice)
    except (KeyError, ValueError):
        pass
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if os.path.exists(f"c04_rank{rank}.jsonl"):
        os.remove(f"c04_rank{rank}.jsonl")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
    g = torch.Generator().manual_seed(777 + rank)  # a stream of its own for each rank
    for epoch in range(EPOCHS):
        for step in range(STEPS):
            x, y = sample(g)
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            averager.average_parameters(model.parameters())
            log(rank, epoch=epoch, step=step, loss=loss.item())
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data.div_(world)
        check(model, rank)
        dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
