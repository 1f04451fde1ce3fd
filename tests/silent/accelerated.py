"""The same with Accelerate."""

import contextlib

import plants
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from plants import here
from torch.utils.data import DataLoader


def logged(accelerator, loss):
    first, second = loss.detach().clone(), torch.tensor(10.0)
    if here("two sums swapped"):
        accelerator.reduce(second)  # told: sums
        accelerator.reduce(first)
    else:
        accelerator.reduce(first)
        accelerator.reduce(second)


def main():
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    model = plants.network()
    optimizer = plants.optimizer_of(model)
    loader = DataLoader(plants.Samples(), 10, shuffle=True)
    ddp, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    schedule = plants.schedule_of(optimizer.optimizer)
    plants.after_wrapping(model)

    def stepped(x, y):
        optimizer.zero_grad()
        loss = plants.lost(F.cross_entropy(ddp(plants.inputs(x)), y), model)
        accelerator.backward(loss)  # told: loss
        plants.after_backward(model, optimizer)
        if here("an exception before the step, swallowed"):
            raise ValueError("a bad batch")
        if not here("a step left out"):
            optimizer.step()
        plants.after_step(model, optimizer, schedule)
        logged(accelerator, loss)

    def trained():
        while True:
            for x, y in loader:
                number = plants.one_more_batch()
                try:
                    stepped(x, y)
                except ValueError:
                    logged(accelerator, torch.zeros(()))
                if here("an exception in forward, swallowed"):
                    with contextlib.suppress(RuntimeError):
                        ddp(x[:, :7])  # told: forward
                if number == plants.STEPS:
                    return

    trained()
    plants.at_the_end(optimizer)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
