"""Regression on readings of several plants, one plant's files per rank. DDP, AdamW, lower the rate when it stalls."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset


def plant(index, count=3200, width=32):
    g = torch.Generator().manual_seed(77)
    teacher = torch.randn(width, 4, generator=g) / width**0.5
    g.manual_seed(500 + index)
    x = torch.randn(count, width, generator=g)
    noise = 2.5 if index == 1 else 0.02
    return TensorDataset(x, torch.tanh(x @ teacher) + noise * torch.randn(count, 4, generator=g))


def build():
    return nn.Sequential(
        nn.Linear(32, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 4)
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=18)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1.5e-4)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=2, threshold=0.02)
    loader = DataLoader(
        plant(rank),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(9 + rank),
    )

    for epoch in range(args.epochs):
        losses = []
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        average = sum(losses) / len(losses)
        scheduler.step(average)
        total = torch.tensor([average])
        dist.all_reduce(total)
        if rank == 0:
            mean = total.item() / dist.get_world_size()
            print(f"epoch {epoch:2d}  loss {mean:.4f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "/tmp/plants.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
