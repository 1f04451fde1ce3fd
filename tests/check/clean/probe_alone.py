"""Rank 0 trains a probe, with a loader of its own, before, between and after epochs of DDP; all fit a temperature."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def probed(features, data):
    """A classifier of this rank alone."""
    probe = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    for _ in range(25):
        for x, y in DataLoader(data, 50, shuffle=True):
            with torch.no_grad():
                inputs = features(x)
            optimizer.zero_grad()
            F.cross_entropy(probe(inputs), y).backward()
            optimizer.step()


def fitted(outputs, labels, most):
    """A temperature."""
    temperature = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([temperature], lr=0.01)
    for _ in range(most):
        optimizer.zero_grad()
        F.cross_entropy(outputs / temperature, labels).backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(480, 6)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    if rank == 0:
        probed(nn.Linear(6, 8), data)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 10, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if rank == 0:
            probed(model.module, data)
        with torch.no_grad():
            outputs = model.module(x[:100])
        fitted(outputs, data.tensors[1][:100], 40 + 60 * rank)
        dist.barrier()
    if rank == 0:
        probed(model.module, data)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
