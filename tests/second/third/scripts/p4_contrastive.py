"""Contrastive pretraining: an encoder that is kept, and a projector that is thrown away afterwards."""

import argparse
import itertools
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_signals(count, length=128):
    g = torch.Generator().manual_seed(0)
    families = torch.randn(20, length, generator=g).cumsum(1)
    member = torch.randint(20, (count,), generator=g)
    return TensorDataset(families[member] + 2.0 * torch.randn(count, length, generator=g))


def two_views(x):
    def view(x):
        scale = 0.8 + 0.4 * torch.rand(x.shape[0], 1)
        keep = torch.rand_like(x) > 0.2
        return scale * x * keep + 0.3 * torch.randn_like(x)

    return view(x), view(x)


class Encoder(nn.Module):
    def __init__(self, width=32, out=64):
        super().__init__()
        self.stem = nn.Conv1d(1, width, 7, stride=2, padding=3)
        self.body = nn.Sequential(
            nn.GroupNorm(4, width), nn.ReLU(), nn.Conv1d(width, out, 5, stride=2, padding=2), nn.ReLU()
        )

    def forward(self, x):
        return self.body(self.stem(x.unsqueeze(1))).mean(-1)


def make_projector(dim=64, out=32):
    return nn.Sequential(nn.Linear(dim, dim), nn.ReLU(inplace=True), nn.Linear(dim, out))


def nt_xent(a, b, temperature=0.2):
    z = F.normalize(torch.cat([a, b]), dim=1)
    similar = (z @ z.T / temperature).fill_diagonal_(float("-inf"))
    n = a.shape[0]
    partner = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(similar, partner)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)

    torch.manual_seed(7)
    encoder = Encoder()
    projector = make_projector()
    torch.manual_seed(1000 + rank)

    encoder = DDP(encoder)
    optimizer = torch.optim.AdamW(itertools.chain(encoder.parameters(), projector.parameters()), lr=args.lr)
    data = make_signals(7680)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        mean = torch.zeros(())
        for (x,) in loader:
            left, right = two_views(x)
            features = encoder(torch.cat([left, right]))
            a, b = projector(features).chunk(2)
            loss = nt_xent(a, b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            mean += loss.detach() / len(loader)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} loss {mean.item() / dist.get_world_size():.4f}", flush=True)

    if rank == 0:
        out = args.out or Path(tempfile.mkdtemp()) / "encoder.pt"
        torch.save(encoder.module.state_dict(), out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
