"""Click prediction with gradient accumulation, kept in a small class."""
import contextlib
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Accumulator:
    """Sums gradients of `every` micro-batches, then takes the mean of them and a step."""

    def __init__(self, model, opt, every, total):
        self.model, self.opt, self.every, self.total = model, opt, every, total
        self.seen = self.pending = self.updates = 0

    def boundary(self):
        return self.pending + 1 == self.every or self.seen + 1 == self.total

    def context(self):
        return contextlib.nullcontext() if self.boundary() else self.model.no_sync()

    def backward(self, loss):
        last = self.boundary()
        loss.backward()
        self.seen += 1
        self.pending += 1
        if last:
            self.apply()

    def apply(self):
        for p in self.model.parameters():
            p.grad.mul_(1.0 / self.every)
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.opt.step()
        self.opt.zero_grad()
        self.pending = 0
        self.updates += 1

    def rewind(self):
        self.seen = 0


def make_data(n=608):
    g = torch.Generator().manual_seed(9)
    x = torch.randn(n, 14, generator=g)
    return TensorDataset(x, (x[:, :3].sum(1) > 0).float())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)        # 38 batches a rank
    model = DDP(nn.Sequential(nn.Linear(14, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)))
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    acc = Accumulator(model, opt, every=6, total=len(loader))
    for epoch in range(4):
        sampler.set_epoch(epoch)
        acc.rewind()
        for x, y in loader:
            with acc.context():
                loss = F.binary_cross_entropy_with_logits(model(x), y)
                acc.backward(loss)
            time.sleep(0.02)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {acc.updates} updates, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
