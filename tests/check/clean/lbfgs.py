"""LBFGS: the closure goes forward and backward several times a step, on data that each rank has a share of."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(240, 5, generator=generator)
    y = x @ torch.randn(5, 1, generator=generator) + 0.1 * torch.randn(240, 1, generator=generator)
    x, y = x[rank::world], y[rank::world]
    torch.manual_seed(0)
    model = DDP(nn.Linear(5, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, history_size=5)
    for step in range(12):

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            # every rank must take the same decisions: the loss that LBFGS sees is the mean over ranks
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            return mean / world

        loss = optimizer.step(closure)
        if rank == 0 and step % 4 == 0:
            print(f"step {step}: {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
