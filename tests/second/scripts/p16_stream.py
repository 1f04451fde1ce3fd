"""A stream of samples that splits itself among the workers of a DataLoader."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, n, seed):
        self.n, self.seed, self.epoch = n, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for i in order[worker::workers].tolist():
            g = torch.Generator().manual_seed(i)
            x = torch.randn(8, generator=g)
            yield x, x.abs().sum().unsqueeze(0)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--workers", type=int, default=0)
    p.add_argument("--epochs", type=int, default=3)
    a = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stream = Stream(240, seed=77)
    loader = DataLoader(stream, batch_size=12, num_workers=a.workers)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(a.epochs):
        stream.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.l1_loss(model(x), y)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
