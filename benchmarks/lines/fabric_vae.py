"""A variational autoencoder on MNIST: a loss that is a sum, and noise that the loop draws."""

import argparse

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from mnist_single import dataset
from torch import nn
from torch.utils.data import DataLoader

fabric = Fabric()


class Autoencoder(nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.noise = noise
        self.encode, self.mean, self.log_variance = nn.Linear(784, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.decode = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 784))

    def forward(self, images):
        hidden = F.relu(self.encode(images.flatten(1)))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + self.noise * torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decode(code), mean, log_variance


def loss_of(images, output, mean, log_variance):
    reconstruction = F.binary_cross_entropy_with_logits(output, images.flatten(1), reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return reconstruction + divergence


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=60000)
    parser.add_argument("--noise", type=float, default=1.0)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--save", default="vae.pt")
    args = parser.parse_args()
    torch.manual_seed(1 + fabric.global_rank)
    dtype = torch.float64 if args.double else torch.float32
    data = dataset("train", args.samples, dtype)
    loader = DataLoader(data, 128 // fabric.world_size, shuffle=True, generator=torch.Generator().manual_seed(1))

    model = Autoencoder(args.noise).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for epoch in range(args.epochs):
        total = 0.0
        for images, _ in loader:
            optimizer.zero_grad()
            loss = loss_of(images, *model(images))
            fabric.backward(loss * fabric.world_size)
            optimizer.step()
            total += loss.item()
        fabric.print(f"epoch {epoch + 1}: loss {fabric.all_reduce(total, reduce_op='sum') / len(data):.4f}")
    fabric.save(args.save, model.state_dict())


if __name__ == "__main__":
    main()
