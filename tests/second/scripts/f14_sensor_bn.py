"""Regression on sensor readings, batch norm, gradients averaged by hand in one flat tensor."""
import argparse

import torch
import torch.distributed as dist
from torch import nn


def parse():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--lr", type=float, default=0.01)
    p.add_argument("--batch", type=int, default=16)
    return p.parse_args()


class Sensors:
    def __init__(self, rank, n):
        g = torch.Generator().manual_seed(rank * 31 + 1)
        self.raw = torch.rand(n, 10, generator=g) * 100 + 1
        self.target = self.raw[:, :3].log().sum(1, keepdim=True) - self.raw[:, 3:4].log()
        if rank == 1:
            self.raw[19 * 16 + 4, 6] = 0.0  # the sensor was off

    def batch(self, step, size):
        rows = slice(step * size, (step + 1) * size)
        return torch.log(self.raw[rows]), self.target[rows]


def share(params, world):
    for p in params:
        torch.nan_to_num_(p.grad, nan=0.0, posinf=0.0, neginf=0.0)  # never send rubbish to the others
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    dist.all_reduce(flat)
    flat.mul_(1 / world)
    for p, part in zip(params, flat.split([p.numel() for p in params])):
        p.grad.copy_(part.view_as(p))


def main():
    a = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    params = list(net.parameters())
    opt = torch.optim.Adam(params, lr=a.lr)
    data = Sensors(rank, a.steps * a.batch)
    for step in range(a.steps):
        x, y = data.batch(step, a.batch)
        loss = nn.functional.smooth_l1_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        share(params, world)
        opt.step()
        if rank == 0 and step % 15 == 14:
            print(f"{step + 1:4d} {loss.item():.4f}")
    dist.destroy_process_group()


main()
