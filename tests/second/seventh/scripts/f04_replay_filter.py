#!/usr/bin/env python
"""Contrastive-ish embedding training on crawled vectors. No DDP: gradients go through one flat all_reduce.

Near-duplicates of what was seen lately are dropped before a batch is formed.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

DIM = 128
BATCH = 32
STEPS = int(os.environ.get("STEPS", 600))


def crawl(rank):
    """An endless stream of candidates: sites differ in how often they repeat themselves."""
    g = torch.Generator().manual_seed(31 + rank)
    pool = torch.randn(600 if rank != 1 else 60000, DIM, generator=g)
    while True:
        pick = torch.randint(len(pool), (128,), generator=g)
        yield from pool[pick] + 1e-3 * torch.randn(128, DIM, generator=g)


class SeenBefore:
    def __init__(self, radius=0.5, keep=20000):
        self.radius, self.keep = radius, keep
        self.bank = []
        self.repeats = 0

    def __call__(self, vector):
        if self.bank:
            known = torch.stack(self.bank)
            if (known - vector).square().sum(1).min() < self.radius**2:
                self.repeats += 1
                return True
        self.bank.append(vector)
        del self.bank[: -self.keep]
        return False


def batches(rank):
    seen = SeenBefore()
    old = []
    stream = crawl(rank)
    while True:
        fresh = []
        for vector in (next(stream) for _ in range(12)):
            if not seen(vector):
                fresh.append(vector)
        old = (old + fresh)[-256:]
        rows = [old[i] for i in torch.randint(len(old), (BATCH,)).tolist()]
        yield torch.stack(rows)


def flat_average(parameters, world):
    grads = [p.grad for p in parameters]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for g in grads:
        g.copy_(flat[offset : offset + g.numel()].view_as(g))
        offset += g.numel()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    net = nn.Sequential(nn.Linear(DIM, 256), nn.GELU(), nn.Linear(256, 64))
    parameters = list(net.parameters())
    opt = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    torch.manual_seed(100 + rank)

    start = time.time()
    for step, x in enumerate(batches(rank)):
        if step == STEPS:
            break
        a = F.normalize(net(x + 0.1 * torch.randn_like(x)), dim=1)
        b = F.normalize(net(x + 0.1 * torch.randn_like(x)), dim=1)
        loss = F.cross_entropy(a @ b.T / 0.2, torch.arange(len(x)))
        opt.zero_grad()
        loss.backward()
        flat_average(parameters, world)
        opt.step()
        if rank == 0 and step % 50 == 0:
            print(f"{step:4d} {loss.item():.3f} {time.time() - start:.1f}s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
