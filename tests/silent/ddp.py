"""A plain DDP script in which something goes wrong on rank 1 without any error: `ddp.py "FAULT; FAULT" [STEPS]`."""

import contextlib

import plants
import torch
import torch.distributed as dist
import torch.nn.functional as F
from plants import has, here
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.set_num_threads(1)
data = plants.Samples()
sampler = DistributedSampler(data)
loader = DataLoader(data, 10, sampler=sampler)
model = plants.network()
ddp = DistributedDataParallel(model)
plants.after_wrapping(model)
optimizer = plants.optimizer_of(model)
schedule = plants.schedule_of(optimizer)


def logged(loss: torch.Tensor) -> None:
    first, second = loss.detach().clone(), torch.tensor(10.0)
    if here("two sums swapped"):
        dist.all_reduce(second)  # told: sums
        dist.all_reduce(first)
    else:
        dist.all_reduce(first)
        dist.all_reduce(second)


def stepped(x: torch.Tensor, y: torch.Tensor) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = plants.lost(F.cross_entropy(ddp(plants.inputs(x)), y), model)
        loss.backward()  # told: loss
        plants.after_backward(model, optimizer)
        return loss

    if here("nan in a closure"):
        x = x * float("nan")
    gives_closure = has("nan in a closure")
    loss = torch.zeros(()) if gives_closure else closure()
    if here("an exception before the step, swallowed"):
        raise ValueError("a bad batch")
    if gives_closure:
        loss = optimizer.step(closure)
    elif not here("a step left out"):
        optimizer.step()
    plants.after_step(model, optimizer, schedule)
    logged(loss)


def trained() -> None:
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for x, y in loader:
            number = plants.one_more_batch()
            try:
                stepped(x, y)
            except ValueError:
                logged(torch.zeros(()))
            if here("an exception in forward, swallowed"):
                with contextlib.suppress(RuntimeError):
                    ddp(x[:, :7])  # told: forward
            if number == plants.STEPS:
                return


trained()
plants.at_the_end(optimizer)
dist.barrier()
dist.destroy_process_group()
