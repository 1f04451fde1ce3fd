"""Lightning Fabric, right in the way that is named: with_fabric.py KIND --folder FOLDER."""

import argparse
import os
from copy import deepcopy
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset


def rows(count, *, seed=0):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())


def launched(**options):
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", **options)
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    return fabric


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 2)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.GELU())

    def forward(self, x):
        return self.head(checkpoint(self.block, self.first(x).relu(), use_reentrant=False))

    def loss(self, x, y):
        return cross_entropy(self(x), y)


@torch.no_grad()
def accuracy(fabric, model, loader):
    """Of all ranks' shares, each of which may have another size."""
    model.eval()
    told = torch.tensor([[(model(x).argmax(1) == y).sum(), len(y)] for x, y in loader]).sum(0)
    hits, count = fabric.all_reduce(told.double(), reduce_op="sum").tolist()
    model.train()
    return hits / count


def windows():
    """Windows that do not divide the epoch, each divided by its own length; clipping where they end."""
    fabric, window = launched(), 4
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.01))
    loader = fabric.setup_dataloaders(DataLoader(rows(404), 8, shuffle=True))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            begun = number - number % window
            length = min(window, len(loader) - begun)
            last = number + 1 == begun + length
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(cross_entropy(model(x), y) / length)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()


def method():
    """A method of the model that is marked as one to be called through DDP; bfloat16; a rate for each step."""
    fabric = launched(precision="bf16-mixed")
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    model.mark_forward_method("loss")
    loader = fabric.setup_dataloaders(DataLoader(rows(400), 8, shuffle=True, drop_last=True))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * len(loader))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(model.loss(x, y))
            optimizer.step()
            scheduler.step()


def stopped():
    """Evaluation in the middle of an epoch and at its end, in shares; all stop when the first rank says so."""
    fabric = launched()
    model, held_out = Net(), rows(61, seed=1)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.01))
    loader = fabric.setup_dataloaders(DataLoader(rows(400), 8, shuffle=True))
    share = Subset(held_out, range(fabric.global_rank, len(held_out), fabric.world_size))
    val_loader = fabric.setup_dataloaders(DataLoader(share, 8), use_distributed_sampler=False)
    best = -1.0
    for epoch in range(6):
        loader.sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            fabric.backward(cross_entropy(model(x), y))
            optimizer.step()
            if number == len(loader) // 2:
                fabric.print(f"{accuracy(fabric, model, val_loader):.3f}")
        score = accuracy(fabric, model, val_loader)
        if fabric.broadcast(score <= best):
            break
        best = score


def resumed():
    """All is saved in the middle of an epoch, and goes on after those batches."""
    fabric, path = launched(), args.folder / "state.ckpt"
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.01))
    loader = fabric.setup_dataloaders(DataLoader(rows(400), 8, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "epoch": 0, "batch": 0}

    def train(*, until=None):
        for epoch in range(state["epoch"], 2):
            loader.sampler.set_epoch(epoch)
            for number, (x, y) in enumerate(loader):
                if epoch == state["epoch"] and number < state["batch"]:
                    continue
                if (epoch, number) == until:
                    return
                optimizer.zero_grad()
                fabric.backward(cross_entropy(model(x), y))
                optimizer.step()

    train(until=(0, 10))
    fabric.save(path, state | {"batch": 10})
    fabric.barrier()
    fabric.load(path, state)
    train()


def averaged():
    """A frozen layer, two rates, a moving average that is evaluated, and a batch sampler of the script's own."""
    fabric = launched()
    net, data = Net(), rows(400)
    net.first.requires_grad_(False)
    groups = [{"params": net.block.parameters()}, {"params": net.head.parameters(), "lr": 0.1}]
    model, optimizer = fabric.setup(net, torch.optim.SGD(groups, 0.01))
    average = deepcopy(net).requires_grad_(False)
    sampler = DistributedSampler(data, fabric.world_size, fabric.global_rank)
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 8, drop_last=True))
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    val_loader = fabric.setup_dataloaders(DataLoader(rows(64, seed=1), 8))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(cross_entropy(model(x), y))
            optimizer.step()
            for mean, parameter in zip(average.parameters(), net.parameters()):
                mean.lerp_(parameter.detach(), 0.1)
        fabric.print(f"{accuracy(fabric, average, val_loader):.3f}")
    if fabric.is_global_zero:
        torch.save(average.state_dict(), args.folder / "average.pt")


class Stream(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for number in range(1000):
            x = torch.randn(6, generator=generator)
            if number % self.world == self.rank:
                yield x, (x[0] > 0).long()


def streamed():
    """A stream of which each rank takes its share."""
    fabric = launched()
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.01))
    loader = fabric.setup_dataloaders(DataLoader(Stream(fabric.global_rank, fabric.world_size), 8))
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        fabric.log("loss", fabric.all_reduce(loss.detach()))


KINDS = (windows, method, stopped, resumed, averaged, streamed)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[kind.__name__ for kind in KINDS])
    parser.add_argument("--folder", type=Path, default=Path("."))
    args = parser.parse_args()
    {kind.__name__: kind for kind in KINDS}[args.kind]()
