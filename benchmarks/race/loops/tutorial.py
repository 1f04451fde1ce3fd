"""The MNIST example of the tutorials from its start to the line with the accuracy; started by torchrun.

    torchrun --nproc-per-node=2 tutorial.py [--epochs 1] [--steps N] [--data-dir DIR]

Rank 0 evaluates, as the tutorials do it, while the others wait.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from race.samples import Images
from race.works import WORKS, mean_loss

LOG_EVERY = 10
TEST_BATCH = 1000


def accuracy(model: nn.Module, loader: DataLoader[object]) -> float:
    model.eval()
    right, count = 0, 0
    with torch.no_grad():
        for images, labels in loader:
            right += int((model(images).argmax(1) == labels).sum())
            count += len(labels)
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    work = WORKS["W1"]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(work.make_model())
    optimizer = work.make_optimizer(model.parameters())
    train_set, test_set = Images("train", arguments.data_dir), Images("test", arguments.data_dir)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=work.batch, sampler=sampler)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for step, (images, labels) in enumerate(loader, 1):
            optimizer.zero_grad()
            loss = mean_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            if step % LOG_EVERY == 0 and rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.6f}", flush=True)
            if step == arguments.steps:
                break
        if rank == 0:
            found = accuracy(model.module, DataLoader(test_set, batch_size=TEST_BATCH))
            print(f"accuracy {found:.4f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
