"""Ring classifier: ranks begin with other weights, rank 0 alone evaluates, and it keeps an average."""
import copy
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def rings(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 3, (n,), generator=g)
    angle = torch.rand(n, generator=g) * 6.283
    radius = label + 0.8 + 0.2 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), label)


@torch.no_grad()
def accuracy(net, data):
    """All of the set in one batch, without any collective."""
    x, y = data.tensors
    net.eval()
    value = (net(x).argmax(1) == y).float().mean().item()
    net.train()
    return value


class Average:
    """Exponential mean of the weights, on rank 0 only; training never reads it."""

    def __init__(self, net):
        self.net = copy.deepcopy(net)

    @torch.no_grad()
    def update(self, net):
        for a, b in zip(self.net.parameters(), net.parameters()):
            a.lerp_(b, 0.05)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)     # other noise on each rank; DDP hands out rank 0's weights
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    model = DDP(net)
    average = Average(net) if rank == 0 else None
    test = rings(500, 77)
    data = rings(1200, 5)
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    best = 0.0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if average is not None:
                average.update(net)
            time.sleep(0.02)
        if rank == 0:
            score = accuracy(average.net, test)
            best = max(best, score)
            print(f"epoch {epoch}: {score:.3f} (raw {accuracy(net, test):.3f})", flush=True)
        dist.barrier()
    verdict = torch.tensor([best])
    dist.broadcast(verdict, src=0)
    if rank == 1:
        print(f"rank 1 has heard of {verdict.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
