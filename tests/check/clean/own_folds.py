"""Ranks train together, and then each continues alone with the model within DDP, on a fold of its own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def trained(model, optimizer, loader):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(480, 6)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 10, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        trained(model, optimizer, loader)
    fold = Subset(data, [n for n in range(len(data)) if n % (world + rank) != rank])
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.05)
    for _ in range(3):
        trained(model.module, optimizer, DataLoader(fold, 10, shuffle=True))
    rights = [torch.zeros(()) for _ in range(world)]
    with torch.no_grad():
        dist.all_gather(rights, (model.module(x).argmax(1) == data.tensors[1]).float().mean())
    if rank == 0:
        print(f"accuracies {torch.stack(rights).mean():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
