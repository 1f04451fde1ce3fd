"""A plain DDP script in which something goes wrong without any error: `ddp.py FAULT [STEPS]`, on rank 1, at step 12."""

import contextlib
import copy
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

fault, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, struck = dist.get_rank(), 12
torch.manual_seed(0)
data = TensorDataset(torch.randn(3000, 20), torch.randint(0, 4, (3000,)))
if fault == "nan in the data" and rank == 1:
    data.tensors[0][2000:] = float("nan")  # the fault
sampler = DistributedSampler(data)
loader = DataLoader(data, 10, sampler=sampler)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
ddp = DistributedDataParallel(model)
if fault == "weights loaded on one rank only" and rank == 1:
    model.load_state_dict(
        copy.deepcopy(
            nn.Sequential(
                *[type(m)(m.in_features, m.out_features) if isinstance(m, nn.Linear) else m for m in model]
            ).state_dict()
        )
    )  # the fault
lr = 0.02 if fault == "another learning rate" and rank == 1 else 0.01
decay = 0.1 if fault == "another weight decay" and rank == 1 else 0.0
if fault == "another optimizer" and rank == 1:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # the fault
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
number, loss_sum, weight_sum = 0, torch.zeros(2), torch.zeros(2)


def here(name: str) -> bool:
    return fault == name and rank == 1 and number == struck


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
    if fault == "slow data" and rank == 1:
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
    if fault == "slow step" and rank == 1:
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
    if fault == "schedule stepped on one rank" and rank == 1:
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
        if fault == "an exception in the model's forward, swallowed" and rank == 1 and number == struck:
            with contextlib.suppress(RuntimeError), ddp.no_sync():
                ddp(x[:, :7])  # the fault
        time.sleep(0.005)
        if number == steps:
            break
    if number == steps:
        break
if fault == "one step more at the end" and rank == 1:
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
