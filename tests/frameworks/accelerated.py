"""A loop with Accelerate."""

import time

import torch
from accelerate import Accelerator
from parts import FOR_EVER_SECONDS, STEPS, error, hangs, network, samples
from torch.utils.data import DataLoader, default_collate


def collate(rows):
    if hangs("collate"):
        time.sleep(FOR_EVER_SECONDS)  # FAULT collate
    return default_collate(rows)


def note(accelerator, loss):
    if hangs("callback"):
        time.sleep(FOR_EVER_SECONDS)  # FAULT callback
    return accelerator.gather(loss.detach()).mean()  # WAITS callback


def main():
    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples(), batch_size=4, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (x, y) in enumerate(loader):
        if hangs("step"):
            time.sleep(FOR_EVER_SECONDS)  # FAULT step
        optimizer.zero_grad()
        loss = error(model, x, y)
        accelerator.backward(loss)
        optimizer.step()
        note(accelerator, loss)
        if step == STEPS:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
