"""Two-tower retrieval model; each tower's gradients are averaged as one bucket, without DDP."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Tower(nn.Module):
    def __init__(self, rows, dim):
        super().__init__()
        self.table = nn.Embedding(rows, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))

    def forward(self, ids):
        return F.normalize(self.mlp(self.table(ids).mean(1)), dim=-1)


class Clicks:
    """Clicks of this process in order of time; new items come into the catalogue as time goes on."""

    def __init__(self, rank, rows, batch, steps):
        g = torch.Generator().manual_seed(500 + rank)
        self.user = torch.randint(rows, (steps, batch, 8), generator=g)
        self.item = (self.user + torch.randint(5, (steps, batch, 8), generator=g)) % (rows - 400)
        launch = torch.rand(steps, batch, 8, generator=g) < (0.10 if rank != 1 else 0.62)
        launch[: int(steps * 0.45)] &= torch.rand(int(steps * 0.45), batch, 8, generator=g) < 0.3
        fresh = rows - 1 - torch.randint(400, launch.shape, generator=g)
        self.item = torch.where(launch, fresh, self.item)
        self.known = rows - 400

    def __iter__(self):
        return iter(zip(self.user, self.item))


class Averager:
    def __init__(self, users, items):
        self.users, self.items, self.world = users, items, dist.get_world_size()

    @staticmethod
    def pack(tower):
        return parameters_to_vector([p.grad for p in tower.parameters()])

    @staticmethod
    def unpack(tower, flat):
        vector_to_parameters(flat, [p.grad for p in tower.parameters()])

    def average(self, mostly_fresh):
        user_flat, item_flat = self.pack(self.users), self.pack(self.items)
        if mostly_fresh:
            dist.all_reduce(item_flat)
            dist.all_reduce(user_flat)
        else:
            dist.all_reduce(user_flat)
            dist.all_reduce(item_flat)
        self.unpack(self.users, user_flat / self.world)
        self.unpack(self.items, item_flat / self.world)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--steps", type=int, default=110)
    p.add_argument("--rows", type=int, default=6000)
    p.add_argument("--dim", type=int, default=64)
    p.add_argument("--batch-size", type=int, default=128)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--temperature", type=float, default=0.1)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(17)
    users, items = Tower(args.rows, args.dim), Tower(args.rows, args.dim)
    optimizer = torch.optim.Adam([*users.parameters(), *items.parameters()], lr=args.lr)
    averager = Averager(users, items)
    clicks = Clicks(rank, args.rows, args.batch_size, args.steps)

    for epoch in range(args.epochs):
        running = torch.zeros(2)
        for user, item in clicks:
            scores = users(user) @ items(item).T / args.temperature
            loss = F.cross_entropy(scores, torch.arange(len(user)))
            optimizer.zero_grad()
            loss.backward()
            fresh = (item >= clicks.known).float().mean().item()
            averager.average(mostly_fresh=fresh > 0.5)
            optimizer.step()
            running += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch}: loss {(running[0] / running[1]).item():.4f}", flush=True)
    if rank == 0:
        torch.save({"users": users.state_dict(), "items": items.state_dict()}, "towers.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
