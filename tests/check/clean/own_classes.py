"""A backbone under DDP; each rank has some classes of the classifier, and an optimizer for them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 4  # of a rank


class Gathered(torch.autograd.Function):
    """The features of all ranks, in the order of ranks."""

    @staticmethod
    def forward(ctx, features):
        found = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(found, features.contiguous())
        return torch.cat(found)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def summed(value):
    """Over ranks; the gradient is that of the rank's own part."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return value + (total - value.detach())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(480, 6)
    data = TensorDataset(x, torch.randint(0, CLASSES * world, (480,)))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 10, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8)))
    torch.manual_seed(100 + rank)
    classes = nn.Parameter(torch.randn(CLASSES, 8) / 8)
    optimizers = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([classes], lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            features = Gathered.apply(model(inputs))
            every = [torch.zeros_like(labels) for _ in range(world)]
            dist.all_gather(every, labels)
            at = torch.cat(every) - CLASSES * rank
            own = (at >= 0) & (at < CLASSES)
            logits = features @ classes.T
            right = torch.where(own, logits.gather(1, at.clamp(0, CLASSES - 1)[:, None])[:, 0], 0.0)
            loss = (summed(logits.exp().sum(1)).log() - summed(right)).mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
