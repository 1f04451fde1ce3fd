"""Uneven data: ranks have different numbers of batches, and Join lets those that have ended shadow the others."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 + rank)  # each rank reads a shard of its own
    count = 10 * (12 + 2 * rank)
    shard = TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))
    loader = DataLoader(shard, batch_size=10, shuffle=True, generator=generator)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        with Join([model]):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        print(f"rank {rank}: epoch {epoch}, {len(loader)} batches")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
