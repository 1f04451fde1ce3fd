"""Contrastive learning with the negatives of all ranks, without DDP; the exchange is written out."""
import random
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)

ITEMS, WIDTH, GLOBAL_BATCH, EPOCHS = 2048, 40, 64, 12


class GatherAll(torch.autograd.Function):
    """Rows of all ranks; in the backward each rank gets the sum of what all ranks know about its rows."""

    @staticmethod
    def forward(ctx, rows):
        ctx.rank, ctx.count = dist.get_rank(), len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad[ctx.rank * ctx.count : (ctx.rank + 1) * ctx.count]


class Shelf:
    """Items that are parsed when they are first asked for; a few are written with a comma."""

    def __init__(self):
        rng = random.Random(3)
        prototypes = [[rng.gauss(0, 1) for _ in range(WIDTH)] for _ in range(16)]
        self.kind = [rng.randrange(16) for _ in range(ITEMS)]
        self.lines = []
        for i, k in enumerate(self.kind):
            mark = "," if i % 701 == 350 else "."
            self.lines.append(" ".join(f"{v + rng.gauss(0, 0.8):.4f}".replace(".", mark) for v in prototypes[k]))
        self.repaired = 0

    def __getitem__(self, i):
        try:
            values = [float(v) for v in self.lines[i].split()]
        except ValueError:
            self.repaired += 1
            values = [float(v.replace(",", ".")) for v in self.lines[i].split()]
        return torch.tensor(values)


def average_gradients(parameters, world):
    handles = [dist.all_reduce(p.grad, async_op=True) for p in parameters]
    for p, handle in zip(parameters, handles):
        handle.wait()
        p.grad /= world


def two_views(x, generator):
    keep = (torch.rand(2, *x.shape, generator=generator) > 0.2).float()
    noise = 0.1 * torch.randn(2, *x.shape, generator=generator)
    return x * keep[0] + noise[0], x * keep[1] + noise[1]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shelf = Shelf()
    torch.manual_seed(99)
    encoder = nn.Sequential(nn.Linear(WIDTH, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 24))
    average = torch.optim.swa_utils.AveragedModel(encoder, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98))
    parameters = list(encoder.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    mine = GLOBAL_BATCH // world
    noise = torch.Generator().manual_seed(500 + rank)
    diary = Path(tempfile.mkdtemp(prefix=f"pairs-{rank}-")) / "diary.txt"

    for epoch in range(EPOCHS):
        order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(epoch)).tolist()
        for begin in range(0, ITEMS, GLOBAL_BATCH):
            chosen = order[begin + rank * mine : begin + (rank + 1) * mine]
            a, b = two_views(torch.stack([shelf[i] for i in chosen]), noise)
            queries = F.normalize(encoder(a), dim=1)
            keys = GatherAll.apply(F.normalize(encoder(b), dim=1))
            target = torch.arange(mine) + rank * mine
            loss = F.cross_entropy(queries @ keys.t() / 0.2, target)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(parameters, world)
            nn.utils.clip_grad_norm_(parameters, 2.0)
            optimizer.step()
            average.update_parameters(encoder)
        with torch.no_grad():
            z = F.normalize(average(torch.stack([shelf[i] for i in range(rank, 512, world)])), dim=1)
            every = GatherAll.apply(z)
            kinds = torch.tensor([shelf.kind[i] for r in range(world) for i in range(r, 512, world)])
            near = (every @ every.t()).fill_diagonal_(-2).argmax(1)
        diary.open("a").write(f"{epoch} {loss.item():.5f} {shelf.repaired}\n")
        if rank == 0:
            print(f"epoch {epoch}: nearest neighbour is of its kind {(kinds[near] == kinds).float().mean().item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
