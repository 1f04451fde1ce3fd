"""Digits with DDP, in the way of the PyTorch tutorial: accumulation, early stopping, resume, sharded validation."""
import argparse
import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

try:
    import apex  # noqa: F401
    HAVE_APEX = True
except ImportError:
    HAVE_APEX = False


class Digits(Dataset):
    def __init__(self, lo, hi, jitter):
        d = load_digits()
        self.x = torch.tensor(d.images[lo:hi], dtype=torch.float32).unsqueeze(1) / 16
        self.y = torch.tensor(d.target[lo:hi])
        self.jitter = jitter

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.jitter:
            x = torch.roll(x, int(torch.randint(-1, 2, (1,))), dims=2) + 0.05 * torch.randn_like(x)
        return x, self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3)
        self.norm = nn.GroupNorm(4, 12)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(12 * 9, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.fc(self.drop(x.flatten(1)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--out", default="c01_out")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31 + rank)  # DDP sends the weights of rank 0; dropout and jitter are each rank's own

    train, val = Digits(0, 421, True), Digits(421, 562, False)
    sampler = DistributedSampler(train, shuffle=True, seed=31, drop_last=True)
    loader = DataLoader(train, batch_size=15, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=32)  # no padding
    model = DDP(Net())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    path = os.path.join(a.out, "last.pt")
    if rank == 0:
        os.makedirs(a.out, exist_ok=True)
    best, bad = float("inf"), 0
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        model.train()
        n, full = len(loader), len(sampler) // 15
        for i, (x, y) in enumerate(loader):
            first = i // a.accum * a.accum
            in_window = min(len(sampler), (first + a.accum) * 15) - first * 15
            last = (i + 1) % a.accum == 0 or i + 1 == n
            with nullcontext() if last else model.no_sync():
                (F.cross_entropy(model(x), y, reduction="sum") / in_window).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
        model.eval()
        tot = torch.zeros(3, dtype=torch.float64)
        with torch.no_grad():
            for x, y in val_loader:
                out = model.module(x)
                tot += torch.tensor([F.cross_entropy(out, y, reduction="sum"), (out.argmax(1) == y).sum(), len(y)])
        dist.all_reduce(tot)
        val_loss = (tot[0] / tot[2]).item()
        if rank == 0:
            print(f"epoch {epoch} val loss {val_loss:.4f} acc {tot[1] / tot[2]:.4f} ({int(tot[2])})")
            time.sleep(0.3)  # a slow disk
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, path)
        bad = bad + 1 if val_loss > best else 0
        best = min(best, val_loss)
        stop = torch.tensor([int(bad >= 2)])
        dist.broadcast(stop, 0)
        if stop.item():
            break
    dist.barrier()
    model.module.load_state_dict(torch.load(path)["model"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
