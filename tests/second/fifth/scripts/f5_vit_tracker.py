"""Tiny vision transformer on synthetic textures; DDP, with a run tracker that keeps a record of the training."""
import argparse
import json
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def textures(n, size, classes, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    grid = torch.linspace(0, 1, size)
    angle = y.float() * math.pi / classes
    wave = torch.cos(angle)[:, None, None] * grid[None, :, None] + torch.sin(angle)[:, None, None] * grid[None, None]
    x = torch.sin(18 * wave + 6.28 * torch.rand(n, 1, 1, generator=g)) + 0.6 * torch.randn(n, size, size, generator=g)
    return TensorDataset(x[:, None], y)


class TinyViT(nn.Module):
    def __init__(self, size, patch, dim, depth, classes):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, patch, stride=patch)
        self.pos = nn.Parameter(torch.randn(1, (size // patch) ** 2, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.encoder(self.patch(x).flatten(2).transpose(1, 2) + self.pos).mean(1))


class Tracker:
    """Scalars and summaries of the weights, in one json file of the main process."""

    def __init__(self, path, enabled):
        self.path, self.enabled, self.scalars, self.summaries = path, enabled, [], {}

    def scalar(self, step, **values):
        if self.enabled:
            self.scalars.append({"step": step, "time": time.time(), **values})

    def watch(self, step, model):
        if not self.enabled:
            return
        for name, p in model.named_parameters():
            if p.ndim == 2:
                spectrum = torch.linalg.svdvals(p.detach())
                self.summaries[name] = {"step": step, "top": spectrum[0].item(),
                                        "rank": (spectrum > 0.01 * spectrum[0]).sum().item()}

    def flush(self):
        if self.enabled:
            with open(self.path, "w") as f:
                json.dump({"scalars": self.scalars, "weights": self.summaries}, f)


def train_epoch(model, loader, optimizer, tracker, step):
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        tracker.scalar(step, loss=loss.item())
        if step > 40:
            tracker.watch(step, model.module)
    return step


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--samples", type=int, default=2560)
    p.add_argument("--dim", type=int, default=128)
    p.add_argument("--depth", type=int, default=3)
    p.add_argument("--lr", type=float, default=1e-3)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = textures(args.samples, 32, 6, seed=1)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(TinyViT(32, 8, args.dim, args.depth, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    tracker, step, start = Tracker("tracker.json", rank == 0), 0, time.time()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        step = train_epoch(model, loader, optimizer, tracker, step)
        tracker.flush()
    if rank == 0:
        print(f"{step} steps in {time.time() - start:.1f} s, loss {tracker.scalars[-1]['loss']:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
