"""Without DDP: one flat buffer of gradients, and a step that all ranks skip together."""
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

STEPS, BATCH = 130, 12


def synchronise(net):
    flat = parameters_to_vector(net.parameters()).detach().clone()
    dist.broadcast(flat, 0)
    vector_to_parameters(flat, net.parameters())


class Flat:
    """Gradients as one vector, averaged over ranks."""

    def __init__(self, net):
        self.params = list(net.parameters())
        self.size = dist.get_world_size()

    def mean(self):
        flat = torch.cat([p.grad.reshape(-1) for p in self.params])
        dist.all_reduce(flat)
        flat /= self.size
        offset = 0
        for p in self.params:
            p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
            offset += p.numel()
        return flat.norm()


def draw(g, step, rank):
    x = torch.randn(BATCH, 6, generator=g)
    y = x.prod(1, keepdim=True).tanh() + x.sum(1, keepdim=True)
    if step % 40 == 25 and rank == step % 3:
        y = y * 60          # an outlier that a single rank meets
    return x, y


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(50 + rank)
    net = nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 1))
    synchronise(net)
    flat = Flat(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=20)
    g = torch.Generator().manual_seed(rank)
    skipped = 0
    for step in range(STEPS):
        x, y = draw(g, step, rank)
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        worst = loss.detach().clone()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)    # the decision is everyone's
        norm = flat.mean()
        if worst > 200:
            skipped += 1
            warm.step()
            continue
        if norm > 5:
            for p in net.parameters():
                p.grad *= 5 / norm
        opt.step()
        warm.step()
        time.sleep(0.02)
        if rank == 0 and step % 26 == 0:
            print(f"{step:3d} {loss.item():.3f}", flush=True)
    if rank == STEPS % dist.get_world_size():
        print(f"rank {rank}: {skipped} steps skipped by all", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
