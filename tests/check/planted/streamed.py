"""An iterable data set; `--plant NAME` as in plain.py."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default="")
plant = parser.parse_args().plant


class Stream(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        number = 0
        while True:
            sample = torch.randn(4, generator=generator)
            if number % self.world == self.rank or plant == "same batches":
                yield sample, sample.sum(0, keepdim=True)
            number += 1


dist.init_process_group("gloo")
torch.manual_seed(0)
loader = DataLoader(Stream(dist.get_rank(), dist.get_world_size()), 8)  # plant: same batches
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    if step == 5000:
        break
dist.destroy_process_group()
