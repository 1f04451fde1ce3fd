"""Digits with DDP. Runs on the cluster and on a workstation."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def cluster():
    return {
        "rank": int(os.environ.get("SLURM_PROCID", 0)),
        "local_rank": int(os.environ.get("SLURM_LOCALID", 0)),
    }


def loaders(where, batch):
    d = load_digits()
    x, y = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(d.target)
    train = TensorDataset(x[:480], y[:480])
    sampler = DistributedSampler(train, num_replicas=dist.get_world_size(), rank=where["rank"], shuffle=True)
    return DataLoader(train, batch_size=batch, sampler=sampler, drop_last=True), sampler


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", default=3, type=int)
    p.add_argument("--batch", default=16, type=int)
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader, sampler = loaders(cluster(), args.batch)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
