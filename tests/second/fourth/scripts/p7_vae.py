"""Variational autoencoder on synthetic spectra, in the style of a small trainer class."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

BANDS = 256


def spectra(count, seed):
    g = torch.Generator().manual_seed(seed)
    axis = torch.linspace(0, 1, BANDS)
    centres, heights = torch.rand(count, 3, 1, generator=g), torch.rand(count, 3, 1, generator=g)
    return (heights * torch.exp(-(((axis - centres) / 0.05) ** 2))).sum(1) + 0.05 * torch.randn(count, BANDS, generator=g)


class VAE(nn.Module):
    def __init__(self, width=512, latent=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(BANDS, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.mean, self.log_var = nn.Linear(width, latent), nn.Linear(width, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, BANDS)
        )

    def forward(self, x):
        h = self.encoder(x)
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z), mean, log_var


class ELBO(nn.Module):
    """Reconstruction and divergence, per sample."""

    def __init__(self, vae, beta):
        super().__init__()
        self.vae, self.beta = vae, beta

    def forward(self, x):
        guess, mean, log_var = self.vae(x)
        reconstruction = F.mse_loss(guess, x, reduction="none").sum(-1)
        divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(-1)
        return reconstruction + self.beta * divergence


class Runner:
    def __init__(self, args):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", self.rank) if torch.cuda.is_available() else torch.device("cpu")
        torch.manual_seed(args.seed)
        vae = VAE(args.width).to(self.device)
        self.objective = ELBO(vae, args.beta)
        self.model = DistributedDataParallel(vae)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        data = spectra(args.samples, seed=1)
        self.sampler = DistributedSampler(data, shuffle=True, drop_last=True)
        self.loader = DataLoader(data, batch_size=args.batch_size, sampler=self.sampler, drop_last=True)
        self.held_out = spectra(400, seed=2)[self.rank :: self.world].to(self.device)
        torch.manual_seed(args.seed + 1 + self.rank)  # the noise of the latents

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for x in self.loader:
            self.optimizer.zero_grad()
            loss = self.objective(x.to(self.device)).mean()
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        losses = self.objective(self.held_out)
        sums = torch.stack([losses.sum(), losses.new_tensor(float(len(losses)))])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def save(self, path):
        if self.rank == 0:
            torch.save(self.model.module.state_dict(), path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--samples", type=int, default=5120)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--beta", type=float, default=0.01)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="vae.pt")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    runner = Runner(args)
    for epoch in range(args.epochs):
        runner.train_epoch(epoch)
        loss = runner.evaluate()
        if runner.rank == 0:
            print(f"epoch {epoch}: negative ELBO {loss:.3f}", flush=True)
    runner.save(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
