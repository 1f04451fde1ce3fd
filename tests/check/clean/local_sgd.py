"""Local SGD: ranks step on their own, and average their weights every four steps; a schedule, weighed rates."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

STEPS_APART = 4


def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


@torch.no_grad()
def accuracy(model, held_out):
    rank, world = dist.get_rank(), dist.get_world_size()
    end = len(held_out) if rank == world - 1 else 10 * (rank + 1)  # the last one takes what is left
    share = Subset(held_out, range(10 * rank, end))
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(share, 8))
    rate = torch.tensor(right / len(share)) * len(share) / len(held_out)  # weighed by its count
    dist.all_reduce(rate)
    return rate.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(400, 6)
    data, held_out = TensorDataset(x, (x.sum(1) > 0).long()), TensorDataset(x[:61], (x[:61].sum(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (inputs, labels) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # of a step that is this rank's alone
            optimizer.step()
            schedule.step()
            if (i + 1) % STEPS_APART == 0:
                average(model)
        average(model)
        score = accuracy(model, held_out)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {score:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
