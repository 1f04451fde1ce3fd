"""Segmentation of blobs with a small U-Net, in micro-batches; DDP."""
import argparse
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Blobs(Dataset):
    def __init__(self, n, size, seed):
        self.n, self.size, self.seed = n, size, seed
        line = torch.arange(size).float()
        self.yy, self.xx = line[:, None], line[None, :]

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100_003 + i)
        cy, cx, r = (torch.rand(3, generator=g) * self.size * 0.5 + self.size * 0.2).tolist()
        mask = ((self.yy - cy) ** 2 + (self.xx - cx) ** 2 < (r / 2) ** 2).float()
        image = mask + 0.7 * torch.randn(self.size, self.size, generator=g)
        return image[None], mask[None]


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.a, self.b, self.c = conv(1, w), conv(w, 2 * w), conv(2 * w, 2 * w)
        self.up, self.out = conv(3 * w, w), nn.Conv2d(w, 1, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.c(self.b(F.max_pool2d(a, 2)))
        return self.out(self.up(torch.cat([a, F.interpolate(b, scale_factor=2)], 1)))


def dice_bce(logits, target):
    p = logits.sigmoid()
    dice = 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)
    return F.binary_cross_entropy_with_logits(logits, target) + dice


def windows(loader, length):
    """The batches of the loader in lists of `length`; what is left over comes as a shorter list."""
    it = iter(loader)
    while chunk := list(islice(it, length)):
        yield chunk


class Fit:
    def __init__(self, model, optimizer, accumulate):
        self.model, self.optimizer = model, optimizer
        self.accumulate = accumulate
        self.scale = 1.0 / accumulate

    def update(self, chunk):
        total = 0.0
        for k, (image, mask) in enumerate(chunk):
            last = k == len(chunk) - 1
            with nullcontext() if last else self.model.no_sync():
                loss = dice_bce(self.model(image), mask)
                loss.mul(self.scale).backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total / len(chunk)

    def epoch(self, loader):
        losses = [self.update(chunk) for chunk in windows(loader, self.accumulate)]
        return sum(losses) / len(losses)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--samples", type=int, default=1072)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--accumulate", type=int, default=4)
    p.add_argument("--lr", type=float, default=3e-3)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Blobs(args.samples, 32, seed=4)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(UNet(12))
    fit = Fit(model, torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9), args.accumulate)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = torch.tensor(fit.epoch(loader))
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item() / dist.get_world_size():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
