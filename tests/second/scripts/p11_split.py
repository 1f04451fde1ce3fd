"""Trains on 85 % and validates on 15 %; every rank has its own seed so that dropout differs."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


def data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(560, 30, generator=g)
    full = TensorDataset(x, (x[:, :5].sum(1) + torch.randn(560, generator=g) > 0).long())
    return random_split(full, [480, 80])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(100 + dist.get_rank())
    train, val = data()
    train_sampler = DistributedSampler(train, shuffle=True)
    val_sampler = DistributedSampler(val, shuffle=False)
    train_loader = DataLoader(train, batch_size=16, sampler=train_sampler)
    val_loader = DataLoader(val, batch_size=16, sampler=val_sampler)
    model = DDP(nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        hits = torch.zeros(2, dtype=torch.double)
        with torch.no_grad():
            for x, y in val_loader:
                hits[0] += (model(x).argmax(1) == y).sum()
                hits[1] += len(y)
        dist.all_reduce(hits)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {hits[0] / hits[1]:.3f} of {int(hits[1])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
