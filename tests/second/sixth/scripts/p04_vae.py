"""A variational autoencoder of small digits-like images; the bound is a method of the model."""
import argparse
import logging

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

log = logging.getLogger("vae")


class VAE(nn.Module):
    def __init__(self, size=100, hidden=64, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, hidden), nn.ELU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ELU(), nn.Linear(hidden, size))
        self.latent = latent

    def forward(self, x):
        mean, logvar = self.encoder(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        return self.decoder(z), mean, logvar

    def negative_elbo(self, x, beta):
        logits, mean, logvar = self(x)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(-1)
        divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(-1)
        return (reconstruction + beta * divergence).mean()

    @torch.no_grad()
    def sample(self, count):
        return torch.sigmoid(self.decoder(torch.randn(count, self.latent)))


class Parallel(DDP):
    """DDP, but attributes and methods of the model can be asked of it."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def bars(count, seed):
    g = torch.Generator().manual_seed(seed)
    rows = (torch.rand(count, 10, 1, generator=g) < 0.2).float()
    columns = (torch.rand(count, 1, 10, generator=g) < 0.2).float()
    return torch.maximum(rows.expand(-1, 10, 10), columns.expand(-1, 10, 10)).flatten(1)


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = Parallel(VAE())
    torch.manual_seed(args.seed + 1 + rank)
    data = TensorDataset(bars(1536, 4))
    sampler = DistributedSampler(data, world, rank, seed=args.seed, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total, batches = 0.0, 0
        for (x,) in loader:
            beta = min(1.0, step / 200)
            optimizer.zero_grad()
            loss = model.negative_elbo(x, beta)
            loss.backward()
            optimizer.step()
            total, batches, step = total + loss.item(), batches + 1, step + 1
        sums = torch.tensor([total, batches], dtype=torch.float64)
        dist.all_reduce(sums)
        if rank == 0:
            log.info("epoch %d bound %.3f mean pixel %.3f", epoch, -sums[0] / sums[1], model.sample(16).mean())
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "args": vars(args)}, args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--out", default="/tmp/fourth_vae.pt")
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    train(parser.parse_args())
    dist.destroy_process_group()
