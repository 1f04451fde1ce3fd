"""Ignite's engine."""

import time

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from parts import FOR_EVER_SECONDS, STEPS, error, hangs, network, samples
from torch.utils.data import default_collate


def collate(rows):
    if hangs("collate"):
        time.sleep(FOR_EVER_SECONDS)  # FAULT collate
    return default_collate(rows)


def training(local_rank):
    model = idist.auto_model(network())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = idist.auto_dataloader(samples(), batch_size=8, shuffle=True, collate_fn=collate)

    def update(engine, batch):
        if hangs("step"):
            time.sleep(FOR_EVER_SECONDS)  # FAULT step
        optimizer.zero_grad()
        loss = error(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine):
        if hangs("callback"):
            time.sleep(FOR_EVER_SECONDS)  # FAULT callback
        idist.all_reduce(engine.state.output)  # WAITS callback

    trainer.run(loader, max_epochs=1, epoch_length=STEPS)


def main():
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training)


if __name__ == "__main__":
    main()
