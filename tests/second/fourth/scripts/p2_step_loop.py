"""Residual network on synthetic textures, with a loop that counts steps instead of epochs."""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 5


def textures(count, size, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (count,), generator=g)
    angle = (y / CLASSES * math.pi)[:, None, None]
    rows = torch.arange(size).float()[None, :, None]
    columns = torch.arange(size).float()[None, None]
    wave = torch.sin(0.9 * (rows * angle.sin() + columns * angle.cos()) + 6.3 * torch.rand(count, 1, 1, generator=g))
    return TensorDataset((wave + 2.5 * torch.randn(count, size, size, generator=g))[:, None], y)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.two = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm_one, self.norm_two = nn.GroupNorm(4, width), nn.GroupNorm(4, width)

    def forward(self, x):
        return x + self.two(F.relu(self.norm_two(self.one(F.relu(self.norm_one(x))))))


class ResNet(nn.Module):
    def __init__(self, width=32, blocks=3):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.head(F.relu(self.blocks(self.stem(x))).mean((2, 3)))


class Feed:
    """Batches without end."""

    def __init__(self, dataset, batch_size, seed):
        self.sampler = DistributedSampler(dataset, shuffle=True, seed=seed, drop_last=True)
        self.loader = DataLoader(dataset, batch_size=batch_size, sampler=self.sampler, drop_last=True)
        self._it = iter(self.loader)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self._it)
        except StopIteration:
            self._it = iter(self.loader)
            return next(self._it)


@torch.no_grad()
def evaluate(net, data, batch_size, rank, world):
    net.eval()
    x, y = (t[rank::world] for t in data.tensors)
    hits = sum((net(a).argmax(-1) == b).sum() for a, b in zip(x.split(batch_size), y.split(batch_size)))
    counts = torch.stack([hits, torch.tensor(len(y))])
    dist.all_reduce(counts)
    net.train()
    return counts[0].item() / counts[1].item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--eval-every", type=int, default=60)
    parser.add_argument("--images", type=int, default=960)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    torch.manual_seed(0)
    net = DDP(ResNet())
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    feed = Feed(textures(args.images, 32, seed=1), args.batch_size, seed=0)
    held_out = textures(256, 32, seed=2)

    for step, (x, y) in enumerate(feed, start=1):
        loss = F.cross_entropy(net(x), y, label_smoothing=0.05)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        cosine.step()
        if step % args.eval_every == 0:
            score = evaluate(net.module, held_out, 64, rank, world)
            if rank == 0:
                print(f"step {step}: accuracy {score:.3f}", flush=True)
        if step == args.steps:
            break

    if rank == 0:
        torch.save(net.module.state_dict(), "textures.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
