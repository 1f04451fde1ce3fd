"""Imputation of gappy sensor series under DDP: some readings are hidden and have to be restored."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)

LENGTH, CHANNELS = 40, 5


def make_series(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(LENGTH).float()[None, :, None]
    speed = 0.1 + 0.5 * torch.rand(n, 1, CHANNELS, generator=g)
    phase = 6.28 * torch.rand(n, 1, CHANNELS, generator=g)
    x = torch.sin(speed * t + phase) + 0.05 * torch.randn(n, LENGTH, CHANNELS, generator=g)
    share = 0.05 + 0.9 * torch.rand(n, 1, 1, generator=g) ** 2
    present = torch.rand(n, LENGTH, CHANNELS, generator=g) < share
    held = present & (torch.rand(n, LENGTH, CHANNELS, generator=g) < 0.3)
    return TensorDataset(x * present, present & ~held, held)


class Imputer(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(2 * CHANNELS, width, 5, padding=2), nn.GELU(),
            nn.Conv1d(width, width, 5, padding=4, dilation=2), nn.GELU(),
            nn.Conv1d(width, width, 5, padding=8, dilation=4), nn.GELU(),
            nn.Conv1d(width, CHANNELS, 1),
        )

    def forward(self, x, visible):
        seen = torch.cat([x * visible, visible.float()], dim=2)
        return self.net(seen.transpose(1, 2)).transpose(1, 2)


def restoration_loss(guess, x, held):
    squared = (guess - x).square().masked_fill(~held, 0.0)
    return squared.sum() / held.sum().clamp(min=1)


@torch.no_grad()
def rmse(model, data, rank, world):
    model.eval()
    x, visible, held = data[slice(rank, None, world)]
    error = (model(x, visible) - x)[held].square().sum()
    both = torch.stack([error, held.sum().float()])
    dist.all_reduce(both)
    model.train()
    return (both[0] / both[1]).sqrt().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    train, test = make_series(3072, seed=1), make_series(300, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=12)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(Imputer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, visible, held in loader:
            loss = restoration_loss(model(x, visible), x, held)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        error = rmse(model.module, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: rmse of what was hidden {error:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
