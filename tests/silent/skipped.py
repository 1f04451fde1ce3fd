"""Rank 1 skips a batch after an exception that it swallows; the last all-reduce of the others fails, and they swallow
that too: `skipped.py HOW`. HOW averages the gradients: "by DDP", "by hand", "by hand, asynchronously".
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HOW, BAD_BATCH = sys.argv[1], 25
dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
data = TensorDataset(torch.randn(600, 6), torch.randn(600, 1))
net = nn.Linear(6, 1)
model = DistributedDataParallel(net) if HOW == "by DDP" else net
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sampler = DistributedSampler(data)


def average() -> None:
    if HOW == "by hand":
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)  # swallowed: by hand
    if HOW == "by hand, asynchronously":
        works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in net.parameters()]
        for work in works:
            work.wait()  # swallowed: by hand, asynchronously


number = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, 10, sampler=sampler):
        number += 1
        try:
            if rank == 1 and number == BAD_BATCH:
                raise ValueError("a bad batch")
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()  # swallowed: by DDP
            average()
            optimizer.step()
        except Exception:
            continue
