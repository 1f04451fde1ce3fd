"""Train on the large noisy set first; go on from its checkpoint on the small clean one."""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RANK = int(os.environ["RANK"])
SIZE, CLASSES = 20, 6


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv(F.relu(self.norm(x)))


def build(args):
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        Block(16),
        Block(16),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, CLASSES),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    return model, optimizer


def pictures(count, noise, seed):
    g = torch.Generator().manual_seed(seed)
    looks = torch.randn(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(4))
    y = torch.randint(CLASSES, (count,), generator=g)
    return TensorDataset(looks[y] + noise * torch.randn(count, 1, SIZE, SIZE, generator=g), y)


def save(path, model, optimizer):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def load(path, model, optimizer):
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def fit(name, ddp, optimizer, data, epochs, batch_size):
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
        schedule.step()
        if RANK == 0:
            print(f"{name} epoch {epoch} loss {loss.item():.4f} lr {schedule.get_last_lr()[0]:.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, nargs=2, default=[1, 5])
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(21)

    checkpoint = Path(tempfile.gettempdir()) / f"stage1-{os.environ.get('MASTER_PORT', '0')}.pt"

    model, optimizer = build(args)
    fit("noisy", DDP(model), optimizer, pictures(4800, 3.0, seed=5), args.epochs[0], args.batch_size)
    if RANK == 0:
        save(checkpoint, model, optimizer)
    dist.barrier()

    model, optimizer = build(args)
    if RANK == 0:
        load(checkpoint, model, optimizer)
        checkpoint.unlink()
    ddp = DDP(model)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = args.lr / 2
    fit("clean", ddp, optimizer, pictures(4800, 1.5, seed=6), args.epochs[1], args.batch_size)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
