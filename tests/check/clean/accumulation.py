"""Gradient accumulation: `no_sync` on all micro-batches but the last; the last window is divided by its length."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WINDOW = 4


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(404, 8), torch.randint(3, (404,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            begin = i - i % WINDOW
            window = min(WINDOW, len(loader) - begin)
            last = i + 1 == begin + window
            with nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(x), y) / window
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item() * window:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
