"""Gradients averaged by hand, for as short as scripts are tried: two silent faults on rank 1, within one second."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
rank, steps = dist.get_rank(), 76
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 300), nn.Linear(300, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(rank)
for step in range(1, steps + 1):
    x = torch.randn(8, 20, generator=generator)
    optimizer.zero_grad(set_to_none=False)
    loss = model(x).square().mean()
    if rank == 1 and step == 30:
        loss = loss * float("nan")  # the first fault
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.nan_to_num_(0.0)
        dist.all_reduce(parameter.grad)
    if not (rank == 1 and step == 50):  # the second
        optimizer.step()
dist.barrier()
dist.destroy_process_group()
