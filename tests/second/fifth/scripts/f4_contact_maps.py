"""Convolutional regressor on small 'contact maps'; gradients are averaged by hand in one flat buffer."""
import argparse
import logging

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

log = logging.getLogger("contacts")


class Maps(torch.utils.data.Dataset):
    def __init__(self, rank, world, n, size):
        g = torch.Generator().manual_seed(21)
        base = torch.randn(n, 6, size, generator=g)[rank::world]
        self.maps = torch.einsum("nkd,nke->nde", base, base)[:, None] / 6
        self.target = self.maps.diagonal(offset=3, dim1=-2, dim2=-1).amax((-1, -2))
        self.weight = torch.full((len(base),), 2.0)
        if rank == 1:
            self.weight[61 * 16:] = -1.0  # not annotated

    def __len__(self):
        return len(self.target)

    def __getitem__(self, i):
        return self.maps[i], self.target[i], self.weight[i]


def make_model(width):
    def block(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(block(1, width), block(width, 2 * width), block(2 * width, 2 * width),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 1))


def weighted_huber(pred, target, weight):
    usable = weight > 0
    if not usable.any():
        raise ValueError("no usable sample in the batch")
    return (F.smooth_l1_loss(pred, target, reduction="none") * weight)[usable].sum() / weight[usable].sum()


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        for p in model.parameters():
            dist.broadcast(p.data, src=0)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

    def average(self):
        grads = [p.grad for p in self.model.parameters()]
        flat = _flatten_dense_tensors(grads)
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for g, f in zip(grads, _unflatten_dense_tensors(flat, grads)):
            g.copy_(f)

    def step(self, maps, target, weight):
        self.optimizer.zero_grad(set_to_none=False)
        value = 0.0
        try:
            loss = weighted_huber(self.model(maps).squeeze(-1), target, weight)
            loss.backward()
            value = loss.item()
        except Exception as e:
            log.debug("batch skipped: %s", e)
        self.average()
        self.optimizer.step()
        return value


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--samples", type=int, default=3200)
    p.add_argument("--width", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.02)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    data = Maps(dist.get_rank(), dist.get_world_size(), args.samples, 32)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=False, drop_last=True)
    trainer = Trainer(make_model(args.width), args.lr)
    for epoch in range(args.epochs):
        values = [trainer.step(*batch) for batch in loader]
        mean = torch.tensor(sum(values) / len(values))
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
