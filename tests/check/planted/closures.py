"""Each step is given a closure, and samplers count their own epochs; `--plant NAME` as in plain.py."""

import argparse
import random
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default="")
plant = parser.parse_args().plant
WINDOW, BATCH, SAMPLES = 3, 8, 416


class Shuffled(Sampler):
    """Shares of an order that is another one in each epoch, which begins after the last index."""

    def __init__(self, rank, world):
        self.rank, self.world, self.epoch = rank, world, 0

    def __iter__(self):
        order = random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)
        yield from order if plant == "same batches" else order[self.rank :: self.world]
        if plant != "same order":
            self.epoch += 1

    def __len__(self):
        return SAMPLES if plant == "same batches" else SAMPLES // self.world


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 1))
loader = DataLoader(data, BATCH, sampler=Shuffled(rank, dist.get_world_size()))  # plant: same batches
model = DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def closure(x, y, window, first, last):
    inside = not last or plant == "no sync"
    with model.no_sync() if inside else nullcontext():  # plant: no sync
        loss = nn.functional.mse_loss(model(x), y) / window
        if first:
            optimizer.zero_grad()
        loss.backward()  # plant: last window divided
    return loss


for _ in range(3):
    for number, (x, y) in enumerate(loader):  # plant: same order
        begun = number - number % WINDOW
        window = WINDOW if plant == "last window divided" else min(WINDOW, len(loader) - begun)
        last = number + 1 in (begun + WINDOW, len(loader))
        compute = partial(closure, x, y, window, number == begun, last)
        if last:
            optimizer.step(compute)
        else:
            compute()
dist.destroy_process_group()
