"""A GAN for points on rings: two DDP models, several critic steps for each step of the generator."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Rings(IterableDataset):
    """An endless stream; every rank draws points of its own."""

    def __init__(self, rank, seed):
        self.generator = torch.Generator().manual_seed(seed + 7919 * rank)

    def __iter__(self):
        while True:
            angle = 2 * math.pi * torch.rand((), generator=self.generator)
            radius = 1.0 + torch.randint(0, 2, (), generator=self.generator)
            noise = 0.05 * torch.randn(2, generator=self.generator)
            yield torch.stack([radius * angle.cos(), radius * angle.sin()]) + noise


def mlp(*widths):
    layers = []
    for a, b in zip(widths, widths[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def average_distance(points):
    """How far points are from their ring, over the points of all ranks."""
    radius = points.norm(dim=1)
    distance = torch.minimum((radius - 1).abs(), (radius - 2).abs())
    sums = torch.stack([distance.sum(), torch.tensor(float(len(points)))])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=240)
    parser.add_argument("--critic-steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--latent", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(2)
    generator = DDP(mlp(args.latent, 32, 32, 2))
    critic = DDP(mlp(2, 32, 32, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    # latent vectors of each rank's own
    torch.manual_seed(1000 + rank)
    real = iter(DataLoader(Rings(rank, 5), batch_size=args.batch))

    for round_ in range(args.rounds):
        for _ in range(args.critic_steps):
            with torch.no_grad():
                fake = generator.module(torch.randn(args.batch, args.latent))
            # one forward for both, as DDP wants one forward for each backward
            truth, forged = critic(torch.cat([next(real), fake])).squeeze(-1).chunk(2)
            critic_loss = F.softplus(-truth).mean() + F.softplus(forged).mean()
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()

        critic.requires_grad_(False)
        forged = critic.module(generator(torch.randn(args.batch, args.latent)))
        generator_loss = F.softplus(-forged).mean()
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        critic.requires_grad_(True)

        if (round_ + 1) % 60 == 0:
            with torch.no_grad():
                distance = average_distance(generator.module(torch.randn(256, args.latent)))
            if rank == 0:
                print(f"round {round_ + 1} critic {critic_loss.item():.4f} distance {distance:.4f}", flush=True)
                torch.save(generator.module.state_dict(), "/tmp/fourth_gan.pt")
    check = torch.cat([p.detach().flatten() for m in (generator, critic) for p in m.parameters()])
    everywhere = [torch.empty_like(check) for _ in range(world)]
    dist.all_gather(everywhere, check)
    assert all(torch.equal(check, other) for other in everywhere)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
