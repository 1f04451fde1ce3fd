"""A plain DDP script in which something goes wrong on rank 1 without any error: `ddp.py "FAULT; FAULT" [STEPS]`.

The first fault strikes at step 12, each further one 16 steps later; faults of settings from the start.
"""

import contextlib
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

faults, steps = sys.argv[1].split("; "), int(sys.argv[2]) if len(sys.argv) > 2 else 60
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
number = 0


def has(name: str) -> bool:
    return name in faults and rank == 1


def here(name: str) -> bool:
    return has(name) and number == 12 + 16 * faults.index(name)


torch.manual_seed(0)
data = TensorDataset(torch.randn(3000, 20), torch.randint(0, 4, (3000,)))
if has("nan in the data"):
    data.tensors[0][2000:] = float("nan")  # the fault
sampler = DistributedSampler(data)
loader = DataLoader(data, 10, sampler=sampler)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
ddp = DistributedDataParallel(model)
if has("weights loaded on one rank only"):
    for one in model.parameters():
        nn.init.normal_(one, std=0.1)  # the fault
lr = 0.02 if has("another learning rate") else 0.01
decay = 0.1 if has("another weight decay") else 0.0
if has("another optimizer"):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # the fault
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))


def logged(loss: torch.Tensor) -> None:
    first, second = loss.detach().clone(), torch.tensor(10.0)
    if here("two sums swapped"):
        dist.all_reduce(second)  # the fault
        dist.all_reduce(first)
    else:
        dist.all_reduce(first)
        dist.all_reduce(second)


def stepped(x: torch.Tensor, y: torch.Tensor) -> None:
    if here("nan in one batch"):
        x = x * float("nan")
    if has("slow data"):
        time.sleep(0.05)  # the fault
    optimizer.zero_grad()
    out = ddp(x)
    loss = F.cross_entropy(out, y)
    if here("an infinite loss"):
        loss = loss * float("inf")
    if here("a gradient that is nan"):
        loss = loss + (model[0].weight - model[0].weight).abs().sqrt().sum()  # the fault
    loss.backward()
    if here("a gradient changed after it was summed"):
        model[2].weight.grad.mul_(2)
    if here("a gradient set to nan after it was summed"):
        model[0].weight.grad[0] = float("nan")
    if here("clipped on one rank"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    if here("gradients zeroed on one rank"):
        optimizer.zero_grad()
    if has("slow step"):
        time.sleep(0.05)
    if here("an exception before the step, swallowed"):
        raise ValueError("a bad batch")
    if not here("a step left out"):
        optimizer.step()
    if here("steps twice"):
        optimizer.step()
    if here("weights changed in place"):
        with torch.no_grad():
            model[4].bias.add_(1e-3)
    if here("a bit flips"):
        model[2].weight.data.view(torch.int32)[3, 5] ^= 1 << 3
    if here("optimizer state lost"):
        optimizer.state.clear()
    if here("weights averaged on one rank"):
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(0.999)
    if here("weights loaded again"):
        model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
    if has("schedule stepped on one rank"):
        schedule.step()
    logged(loss)


for epoch in range(1000):
    sampler.set_epoch(epoch)
    for x, y in loader:
        number += 1
        try:
            stepped(x, y)
        except ValueError:
            logged(torch.zeros(()))
        if here("an exception in forward, swallowed"):
            with contextlib.suppress(RuntimeError):
                ddp(x[:, :7])  # the fault
        time.sleep(0.005)
        if number == steps:
            break
    if number == steps:
        break
if has("one step more at the end"):
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
