"""Validation without padding: each rank takes its slice, what is left over goes to the last one."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    y = (x[:, 0] + 0.8 * torch.randn(n, generator=g) > 0).long()
    return TensorDataset(x, y)


def my_slice(ds, rank, world):
    per = len(ds) // world // 16 * 16
    stop = len(ds) if rank == world - 1 else (rank + 1) * per
    return Subset(ds, range(rank * per, stop))


def accuracy(model, loader):
    model.eval()
    right = count = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item()
            count += len(y)
    acc = torch.tensor(right / count)
    dist.all_reduce(acc, op=dist.ReduceOp.SUM)
    return acc.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, val = make(480, 0), make(77, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    val_loader = DataLoader(my_slice(val, rank, world), batch_size=16)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        acc = accuracy(net, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: validation accuracy {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
