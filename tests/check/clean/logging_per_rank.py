"""Each rank writes a log of its own, in a folder that rank 0 makes; evaluation is shared and its counts are summed."""

import logging
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    """Augments: so ranks must not have the same seed."""

    def __init__(self, count):
        generator = np.random.default_rng(0)
        self.x = torch.from_numpy(generator.standard_normal((count, 6), dtype=np.float32))
        self.y = torch.from_numpy(generator.integers(0, 2, count))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(6), self.y[index]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234 + rank)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    logging.basicConfig(filename=Path(folder[0]) / f"rank-{rank}.log", level=logging.INFO)
    log = logging.getLogger("train")
    data, held_out = Noisy(500), Noisy(100)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler, num_workers=1)
    share = torch.utils.data.Subset(held_out, range(rank, len(held_out), dist.get_world_size()))
    test_loader = DataLoader(share, batch_size=25)
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                log.info("epoch %d step %d loss %.4f pid %d", epoch, step, loss.item(), os.getpid())
        model.eval()
        hits = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for x, y in test_loader:
                hits += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(hits)
        log.info("accuracy %.3f of %d", hits[0] / hits[1], hits[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
