"""Segmentation with unlabelled pixels on three ranks; windows of micro-batches count every labelled pixel once."""
import contextlib
import itertools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

torch.set_num_threads(1)

SIZE, CLASSES, UNLABELLED = 16, 3, 255
WINDOW, MICRO, EPOCHS = 4, 8, 4


class Fields(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        low = torch.randn(n, CLASSES, 4, 4, generator=g)
        truth = F.interpolate(low, size=SIZE, mode="bilinear").argmax(1)
        self.image = truth[:, None] - 1.0 + 0.6 * torch.randn(n, 1, SIZE, SIZE, generator=g)
        share = torch.rand(n, 1, 1, generator=g) ** 2
        self.truth = torch.where(torch.rand(n, SIZE, SIZE, generator=g) < share, UNLABELLED, truth)
        self.image[n // 2, 0, 3, 4] = math.inf

    def __len__(self):
        return len(self.truth)

    def __getitem__(self, i):
        return self.image[i], self.truth[i]


class EveryNth(Sampler):
    """All ranks draw one permutation, a new one each epoch, and each walks through its own residue class."""

    def __init__(self, size, rank, world, seed):
        self.total, self.rank, self.world = size, rank, world
        self.size = size - size % (world * MICRO)
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self):
        return self.size // self.world

    def __iter__(self):
        order = torch.randperm(self.total, generator=self.generator)[: self.size]
        return iter(order[self.rank :: self.world].tolist())


def net(width=16):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=2, dilation=2), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=4, dilation=4), nn.ReLU(), nn.Conv2d(width, CLASSES, 1),
    )


def windows(loader):
    batches = iter(loader)
    while window := list(itertools.islice(batches, WINDOW)):
        yield window


def evaluate(model, data, rank, world):
    tally = torch.zeros(2, dtype=torch.int64)
    model.eval()
    with torch.inference_mode():
        for at in range(rank * MICRO, len(data), world * MICRO):
            image, truth = data[slice(at, at + MICRO)]
            labelled = (truth != UNLABELLED) & image.isfinite().flatten(1).all(1)[:, None, None]
            tally[0] += (model(image).argmax(1) == truth)[labelled].sum()
            tally[1] += labelled.sum()
    model.train()
    dist.reduce(tally, dst=0)
    return tally[0].item() / tally[1].item() if rank == 0 else None


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1000 + rank)
    train, test = Fields(2000, seed=1), Fields(203, seed=2)
    loader = DataLoader(train, batch_size=MICRO, sampler=EveryNth(len(train), rank, world, seed=7))
    model = DDP(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    left_out = 0
    for epoch in range(EPOCHS):
        for window in windows(loader):
            labelled = torch.tensor([sum((truth != UNLABELLED).sum().item() for _, truth in window)])
            dist.all_reduce(labelled)
            optimizer.zero_grad()
            for i, (image, truth) in enumerate(window):
                last = i + 1 == len(window)
                with contextlib.nullcontext() if last else model.no_sync():
                    total = F.cross_entropy(model(image), truth, ignore_index=UNLABELLED, reduction="sum")
                    (total * world / labelled.item()).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not torch.isfinite(norm):
                left_out += 1
                continue
            optimizer.step()
        score = evaluate(model.module, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: pixel accuracy {score:.3f}, {left_out} steps left out", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
