import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def warmup_cosine(optimizer, warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (total - warmup))))

    return LambdaLR(optimizer, factor)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=16, help="of one process")
    p.add_argument("--lr", type=float, default=0.1)
    a = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(512, 5, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, torch.sin(x).sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, a.batch_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=a.lr)
    total = a.epochs * math.ceil(len(data) / a.batch_size)
    scheduler = warmup_cosine(optimizer, total // 10, total)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(xb), yb)
            loss.backward()
            optimizer.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
