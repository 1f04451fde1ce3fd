"""Gradient accumulation with no_sync."""
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUM = 4


def get_data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(416, 10, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def train_one_epoch(model, loader, optimizer):
    model.train()
    n = len(loader)
    for i, (x, y) in enumerate(loader):
        boundary = (i + 1) % ACCUM == 0 or i + 1 == n
        with contextlib.nullcontext() if boundary else model.no_sync():
            loss = F.cross_entropy(model(x), y) / ACCUM
            loss.backward()
        if boundary:
            optimizer.step()
            optimizer.zero_grad()
    return loss.item() * ACCUM


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = get_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)  # 26 on each of two ranks
    model = DDP(nn.Linear(10, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        last = train_one_epoch(model, loader, optimizer)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {last:.4f}")
    dist.destroy_process_group()


main()
