"""Tabular classifier with missing values, stochastic depth, swap noise and a moving average of the weights."""

import argparse
import copy
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

FEATURES, CLASSES = 40, 6


class Table(Dataset):
    def __init__(self, rows, seed, swap=0.0):
        g = torch.Generator().manual_seed(seed)
        weights = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(17))
        x = torch.randn(rows, FEATURES, generator=g)
        self.y = (torch.tanh(x) @ weights + torch.randn(rows, CLASSES, generator=g)).argmax(-1)
        x[torch.rand(rows, FEATURES, generator=g) < 0.1] = float("nan")
        self.x, self.swap, self.seed, self.epoch = x.numpy(), swap, seed, 0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        row = self.x[i]
        if self.swap:
            rng = np.random.default_rng((self.seed, self.epoch, i))
            row = np.where(rng.random(FEATURES) < self.swap, self.x[rng.integers(len(self.x))], row)
        return torch.from_numpy(row), self.y[i]


class Shard(Sampler):
    """Every world-th place of one shuffle that all ranks draw alike; a new one each time it is begun."""

    def __init__(self, length, rank, world, seed):
        self.length, self.rank, self.world, self.seed, self.rounds = length, rank, world, seed, 0

    def __len__(self):
        return self.length // self.world

    def __iter__(self):
        order = np.random.default_rng((self.seed, self.rounds)).permutation(self.length)
        self.rounds += 1
        return iter(order[self.rank :: self.world][: len(self)].tolist())


class Block(nn.Module):
    def __init__(self, width, drop):
        super().__init__()
        self.drop, self.norm = drop, nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        if self.training and torch.rand(()) < self.drop:
            return x
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=256, depth=6, drop=0.3):
        super().__init__()
        self.missing = nn.Parameter(torch.zeros(FEATURES))
        self.stem = nn.Linear(2 * FEATURES, width)
        self.blocks = nn.Sequential(*[Block(width, drop * k / (depth - 1)) for k in range(depth)])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        gone = torch.isnan(x)
        return self.head(self.blocks(self.stem(torch.cat([torch.where(gone, self.missing, x), gone.float()], -1))))


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    counts = torch.zeros(2, dtype=torch.long)
    for x, y in loader:
        counts += torch.stack([(model(x).argmax(-1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=7680)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = Net()
    average = copy.deepcopy(net) if rank == 0 else None
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    torch.manual_seed(100 + rank)

    table = Table(args.rows, seed=1, swap=0.1)
    loader = DataLoader(table, args.batch_size, sampler=Shard(len(table), rank, world, seed=0), drop_last=True)
    held_out = torch.utils.data.Subset(Table(1001, seed=2), range(rank, 1001, world))
    for epoch in range(args.epochs):
        table.epoch = epoch
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if average is not None:
                for slow, now in zip(average.parameters(), net.parameters()):
                    slow.data.lerp_(now.data, 0.02)
        score = accuracy(net, DataLoader(held_out, 128))
        if rank == 0:
            print(f"epoch {epoch}: accuracy {score:.3f}", flush=True)
            torch.save(average.state_dict(), "average.pt.part")
            os.replace("average.pt.part", "average.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
