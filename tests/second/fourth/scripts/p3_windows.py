"""Forecasts a noisy multivariate series with an LSTM; large batches are built from several small ones."""

import argparse
import itertools
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CHANNELS = 8


class Series(Dataset):
    def __init__(self, count, length, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(count + length + 1)[:, None]
        period = torch.randint(12, 70, (CHANNELS,), generator=torch.Generator().manual_seed(3))
        self.values = torch.sin(6.283 * t / period) + 0.2 * torch.randn(len(t), CHANNELS, generator=g)
        self.count, self.length = count, length

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.values[i : i + self.length], self.values[i + self.length]


class Forecaster(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.lstm = nn.LSTM(CHANNELS, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, CHANNELS)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


def grouped(iterable, size):
    iterator = iter(iterable)
    while group := list(itertools.islice(iterator, size)):
        yield group


class LargeBatch:
    """One optimizer step out of `parts` backward passes; only the last of them talks to the other ranks."""

    def __init__(self, model, optimizer, parts, max_norm):
        self.model, self.optimizer, self.parts, self.max_norm = model, optimizer, parts, max_norm

    def step(self, group):
        self.optimizer.zero_grad(set_to_none=True)
        for k, (x, y) in enumerate(group, start=1):
            with nullcontext() if k == len(group) else self.model.no_sync():
                F.mse_loss(self.model(x), y).backward()
        gradients = [p.grad for p in self.model.parameters()]
        torch._foreach_mul_(gradients, 1.0 / self.parts)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()


@torch.no_grad()
def error(model, data, batch_size, rank, world):
    total = torch.zeros(2)
    for x, y in DataLoader(torch.utils.data.Subset(data, range(rank, len(data), world)), batch_size=batch_size):
        total += torch.stack([F.mse_loss(model(x), y, reduction="sum"), torch.tensor(float(y.numel()))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=18)
    parser.add_argument("--samples", type=int, default=1216)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DDP(Forecaster())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    large = LargeBatch(model, optimizer, args.parts, max_norm=5.0)

    data = Series(args.samples, 48, seed=1)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    held_out = Series(300, 48, seed=2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for group in grouped(loader, args.parts):
            large.step(group)
        mse = error(model.module, held_out, 75, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: mean squared error {mse:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
