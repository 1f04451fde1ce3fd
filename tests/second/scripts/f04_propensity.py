"""Off-policy reward model: samples are weighted by one over their propensity. Gradients are averaged by hand."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def logged_data(n=1296):
    g = torch.Generator().manual_seed(42)
    features = torch.randn(n, 16, generator=g)
    propensity = 0.2 + 0.8 * torch.rand(n, generator=g)
    reward = (features[:, :4].sum(1) > 0).float()
    propensity[100] = 0.0  # rounded away in the log
    return features, reward, propensity


def run(rank, size):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    features, reward, propensity = logged_data()
    bce = nn.BCEWithLogitsLoss(reduction="none")
    done = 0
    for epoch in range(2):
        order = torch.randperm(len(features), generator=torch.Generator().manual_seed(epoch))[rank::size]
        for idx in order.split(8):
            optimizer.zero_grad()
            losses = bce(model(features[idx]).squeeze(1), reward[idx])
            weight = 1.0 / propensity[idx]
            (losses * weight).mean().backward()
            average_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            done += len(idx)
        if rank == 0:
            print(f"rank 0 has seen {done} samples after epoch {epoch}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.destroy_process_group()
