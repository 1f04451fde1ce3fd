"""Accumulation with a short last window, an exact score, and one log file for each rank."""
import contextlib
import json
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

ACCUM, EPOCHS = 4, 3


def windows(loader, size):
    """Lists of at most `size` batches; the last one may be shorter."""
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    t = torch.rand(n, generator=g) * 4
    a = t + 3.14159 * y
    return TensorDataset(torch.stack([t * a.cos(), t * a.sin()], 1), y)


@torch.no_grad()
def score(net, data, rank, world):
    """rank, rank + world, ...: nothing twice and nothing left out."""
    net.eval()
    right = torch.zeros(2)
    for x, y in DataLoader(Subset(data, range(rank, len(data), world)), batch_size=16):
        right += torch.tensor([(net(x).argmax(1) == y).sum(), len(y)])
    net.train()
    dist.all_reduce(right)
    return (right[0] / right[1]).item(), int(right[1])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 2))
    model = DDP(net)
    opt = torch.optim.Adam([{"params": net[0].parameters(), "lr": 1e-2},
                            {"params": net[2].parameters(), "lr": 5e-3}])
    data, test = spirals(736, 1), spirals(101, 2)
    sampler = DistributedSampler(data, seed=9)
    loader = DataLoader(data, batch_size=8, sampler=sampler)      # 46 batches: 11 windows and a half
    noise = torch.Generator().manual_seed(600 + rank)
    path = os.path.join(tempfile.gettempdir(), f"exact-{os.environ['MASTER_PORT']}-rank{rank}.jsonl")
    with open(path, "w") as log:
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for window in windows(loader, ACCUM):
                opt.zero_grad()
                for i, (x, y) in enumerate(window):
                    last = i == len(window) - 1
                    with contextlib.nullcontext() if last else model.no_sync():
                        x = x + 0.05 * torch.randn(x.shape, generator=noise)
                        loss = F.cross_entropy(model(x), y) / len(window)
                        loss.backward()
                    time.sleep(0.02)
                opt.step()
                log.write(json.dumps({"epoch": epoch, "loss": loss.item() * len(window)}) + "\n")
            value, count = score(net, test, rank, world)
            if rank == 0:
                print(f"epoch {epoch}: {value:.3f} of {count}", flush=True)
    os.unlink(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
