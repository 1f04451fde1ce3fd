"""Training without a DataLoader: tensors that are cut into batches by hand; `--plant NAME` as in plain.py."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default="")
plant = parser.parse_args().plant

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, y = torch.randn(320, 4), torch.randn(320, 1)
if plant != "same batches":
    x, y = x[rank::world], y[rank::world]
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(20):
    for batch in range(0, len(x), 16):
        loss = nn.functional.mse_loss(model(x[batch : batch + 16]), y[batch : batch + 16])
        optimizer.zero_grad()
        loss.backward()  # plant: same batches
        optimizer.step()
dist.destroy_process_group()
