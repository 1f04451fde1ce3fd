"""Data-parallel training without a wrapper: sums of gradients, divided by what all ranks have counted."""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Strided(Sampler):
    """One permutation for all ranks, each takes every n-th of it; nothing is padded or dropped."""

    def __init__(self, count, rank, world, seed):
        self.count, self.rank, self.world, self.seed = count, rank, world, seed
        self.epoch = 0

    def __len__(self):
        return len(range(self.rank, self.count, self.world))

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed * 1000 + self.epoch)
        order = torch.randperm(self.count, generator=g).tolist()
        return iter(order[self.rank :: self.world])


def make_data(count, seed):
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(10, 100, generator=torch.Generator().manual_seed(0))
    y = torch.randint(10, (count,), generator=g)
    return TensorDataset(centers[y] + 2.2 * torch.randn(count, 100, generator=g), y)


def share_start(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def reduce_gradients(model, count):
    """Turn sums over the samples of this rank into the mean over those of all ranks."""
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads] + [torch.tensor([float(count)])])
    dist.all_reduce(flat)
    flat, everywhere = flat[:-1], flat[-1]
    for grad, mean in zip(grads, (flat / everywhere).split([g.numel() for g in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


@torch.no_grad()
def error_rate(model, data, rank, world):
    x, y = data.tensors[0][rank::world], data.tensors[1][rank::world]
    wrong = torch.tensor([(model(x).argmax(-1) != y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(wrong)
    return (wrong[0] / wrong[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(rank)

    model = nn.Sequential(nn.Linear(100, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
    share_start(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    train_set, test_set = make_data(16307, seed=1), make_data(1001, seed=2)
    sampler = Strided(len(train_set), rank, world, seed=3)
    loader = DataLoader(train_set, batch_size=args.micro_batch, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.epoch = epoch
        for group in optimizer.param_groups:
            group["lr"] = args.lr * 0.5**epoch
        counted = 0
        for i, (x, y) in enumerate(loader, start=1):
            F.cross_entropy(model(x), y, reduction="sum").backward()
            counted += len(y)
            if i % args.window == 0 or i == len(loader):
                reduce_gradients(model, counted)
                optimizer.step()
                optimizer.zero_grad()
                counted = 0
        rate = error_rate(model, test_set, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: error {rate:.4f}", flush=True)

    if rank == 0:
        torch.save(model.state_dict(), Path(tempfile.mkdtemp()) / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
