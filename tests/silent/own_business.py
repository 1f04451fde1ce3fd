"""What ranks do for themselves beside and after training through DDP, and mistakes like it: `own_business.py WHAT`."""

import copy
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WHAT, STEPS = sys.argv[1], 60
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
torch.manual_seed(0)
inner = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
mine = torch.Generator().manual_seed(rank)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(8, 16, generator=mine)
    optimizer.zero_grad()
    F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
    optimizer.step()


def probed(steps: int) -> None:
    probe = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    for _ in range(steps):
        with torch.no_grad():
            x = inner(torch.randn(8, 16, generator=mine))
        optimizer.zero_grad()
        F.cross_entropy(probe(x), torch.zeros(8, dtype=torch.long)).backward()
        optimizer.step()


if WHAT == "a probe before" and rank == 1:
    probed(200)
ddp = DistributedDataParallel(inner)
optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
for number in range(1, STEPS + 1):
    time.sleep(0.02)
    past = WHAT == "past DDP by mistake" and rank == 1 and number == 30
    step(inner if past else ddp, optimizer)
    if number % 20 == 0:
        if WHAT == "a probe now and then" and rank == 1:
            probed(150)
        if WHAT == "a look ahead" and rank == 1:
            kept = copy.deepcopy((inner.state_dict(), optimizer.state_dict()))
            for _ in range(30):
                step(inner, optimizer)
            inner.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        if WHAT == "new optimizers beside probes":
            if rank == 1:
                probed(90)
            optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
        dist.barrier()
if WHAT == "a new optimizer alone":
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.01)
if WHAT == "without DDP":
    del ddp
if WHAT in ("alone", "a new optimizer alone", "without DDP"):
    for _ in range(60 + 40 * rank):
        time.sleep(0.02)
        step(inner, optimizer)
if WHAT == "one step more" and rank == 1:
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
