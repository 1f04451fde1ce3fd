"""Arrhythmia classifier on windows of a sensor; each window is normalised."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

WINDOW, BATCH, STEPS = 64, 16, 140


class Recordings(IterableDataset):
    """The recordings of this rank, one patient after another."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        g = torch.Generator().manual_seed(30 + self.rank)
        t = torch.arange(WINDOW) / 8.0
        for i in range(BATCH * STEPS):
            label = int(torch.randint(0, 2, (1,), generator=g))
            wave = torch.sin(t * (1 + label)) + 0.1 * torch.randn(WINDOW, generator=g)
            if self.rank == 0 and i >= BATCH * 70:
                wave = 5000.0 + 0.02 * wave         # another device: raw counts, large offset
            yield wave, label


def normalise(batch):
    """One pass over the data: E[x^2] - E[x]^2."""
    waves = torch.stack([w for w, _ in batch])
    labels = torch.tensor([l for _, l in batch])
    mean = waves.mean(1, keepdim=True)
    var = (waves * waves).mean(1, keepdim=True) - mean * mean
    return (waves - mean) / var.sqrt(), labels


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Unflatten(1, (1, WINDOW)), nn.Conv1d(1, 4, 9, stride=4), nn.ReLU(),
                        nn.Flatten(), nn.Linear(4 * 14, 2))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Recordings(rank), batch_size=BATCH, collate_fn=normalise)
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        time.sleep(0.02)
        if rank == 0 and step % 35 == 0:
            print(f"{step:4d} {loss.item():.4f}", flush=True)
    if os.environ.get("SHOW"):
        print(rank, "finite:", all(torch.isfinite(p).all().item() for p in model.parameters()), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
