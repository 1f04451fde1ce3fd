"""The classic script: torch's MNIST example under DDP, with the lines of seed 003, the throughput included."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from paceline.data.mnist import read_mnist


def split(name: str, count: int) -> TensorDataset:
    images, labels = read_mnist(name, Path(sys.argv[1]))
    pixels = torch.frombuffer(bytearray(images.data[: count * 784]), dtype=torch.uint8).float() / 255
    return TensorDataset(
        pixels.view(-1, 784), torch.frombuffer(bytearray(labels.data[:count]), dtype=torch.uint8).long()
    )


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, test = split("train", 600), split("test", 200)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 20, sampler=sampler)
    net = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10), nn.LogSoftmax(1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in (1, 2):
        sampler.set_epoch(epoch)
        began = time.monotonic()
        for batch, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if batch % 5 == 0:
                done, percent = batch * len(data), 100.0 * batch / len(loader)
                print(
                    f"Train Epoch: {epoch} [{done}/{len(train)} ({percent:.0f}%)]\tLoss: {loss.item():.6f}", flush=True
                )
        print(f"Throughput: {len(train) / (time.monotonic() - began):.1f} samples/s", flush=True)
        images, labels = test.tensors
        with torch.no_grad():
            output = net(images)
        right = int((output.argmax(1) == labels).sum())
        print(
            f"\nTest set: Average loss: {F.nll_loss(output, labels):.4f}, "
            f"Accuracy: {right}/{len(labels)} ({100.0 * right / len(labels):.0f}%)\n",
            flush=True,
        )
    dist.destroy_process_group()
    # without torch's static destructors: one that meets a gloo thread aborts a rank that is done (4 of 30 runs on a
    # busy machine), and torchrun then ends the other in its last lines
    os._exit(0)


if __name__ == "__main__":
    main()
