"""GAN on rings of points: two DDP models, two optimizers, the critic steps more often, an averaged generator."""
import argparse
import copy
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def rings(n, dim, seed):
    g = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.randint(8, (n, 1), generator=g) / 8
    flat = torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)
    lift = torch.randn(2, dim, generator=torch.Generator().manual_seed(0)) / 2
    return TensorDataset(flat @ lift)


def mlp(i, hidden, o):
    return nn.Sequential(nn.Linear(i, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2),
                         nn.Linear(hidden, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, o))


class Average:
    def __init__(self, net, decay):
        self.net, self.decay = copy.deepcopy(net).requires_grad_(False).eval(), decay

    @torch.no_grad()
    def update(self, net):
        for slow, fast in zip(self.net.parameters(), net.parameters()):
            slow.lerp_(fast, 1 - self.decay)


class GAN:
    def __init__(self, args, dim):
        self.latent = args.latent
        self.generator = DDP(mlp(args.latent, args.hidden, dim))
        self.critic = DDP(mlp(dim, args.hidden, 1))
        self.opt_g = torch.optim.Adam(self.generator.parameters(), lr=args.lr, betas=(0.5, 0.99))
        self.opt_c = torch.optim.Adam(self.critic.parameters(), lr=2 * args.lr, betas=(0.5, 0.99))
        self.average = Average(self.generator.module, 0.99)

    def noise(self, n):
        return torch.randn(n, self.latent)

    def critic_step(self, real):
        with torch.no_grad():
            fake = self.generator.module(self.noise(len(real)))
        score = self.critic(torch.cat([real, fake]))
        loss = F.softplus(-score[:len(real)]).mean() + F.softplus(score[len(real):]).mean()
        self.opt_c.zero_grad()
        loss.backward()
        self.opt_c.step()
        return loss.item()

    def generator_step(self, n):
        self.critic.requires_grad_(False)
        loss = F.softplus(-self.critic.module(self.generator(self.noise(n)))).mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        self.critic.requires_grad_(True)
        self.average.update(self.generator.module)
        return loss.item()


@torch.no_grad()
def picture(net, latent, real):
    points = net(torch.randn(256, latent, generator=torch.Generator().manual_seed(3)))
    return torch.cdist(points, real[:256]).min(1).values.mean().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--samples", type=int, default=9216)
    p.add_argument("--batch-size", type=int, default=96)
    p.add_argument("--critic-steps", type=int, default=2)
    p.add_argument("--latent", type=int, default=32)
    p.add_argument("--hidden", type=int, default=384)
    p.add_argument("--lr", type=float, default=2e-4)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234 + rank)
    data = rings(args.samples, 64, seed=9)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, args.batch_size, sampler=sampler, drop_last=True)
    gan = GAN(args, 64)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        start, losses = time.time(), torch.zeros(2)
        for i, (real,) in enumerate(loader):
            losses[0] += gan.critic_step(real)
            if i % args.critic_steps == args.critic_steps - 1:
                losses[1] += gan.generator_step(len(real))
        dist.all_reduce(losses)
        if rank == 0:
            distance = picture(gan.average.net, args.latent, data.tensors[0])
            print(f"epoch {epoch}: critic {losses[0] / len(loader) / dist.get_world_size():.3f} "
                  f"distance {distance:.3f} in {time.time() - start:.1f} s", flush=True)
            torch.save(gan.average.net.state_dict(), "generator.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
