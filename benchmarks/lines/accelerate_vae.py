"""A variational autoencoder on MNIST: a loss that is a sum, and noise that the loop draws."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from mnist_single import dataset
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=True))


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
    set_seed(1, device_specific=True)
    dtype = torch.float64 if args.double else torch.float32
    data = dataset("train", args.samples, dtype)
    loader = DataLoader(data, batch_size=128, shuffle=True, generator=torch.Generator().manual_seed(1))

    model = Autoencoder(args.noise).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(args.epochs):
        total = 0.0
        for images, _ in loader:
            optimizer.zero_grad()
            loss = loss_of(images, *model(images))
            accelerator.backward(loss * accelerator.num_processes)
            optimizer.step()
            total += loss.item()
        accelerator.print(f"epoch {epoch + 1}: loss {accelerator.reduce(torch.tensor(total)) / len(data):.4f}")
    accelerator.save(accelerator.unwrap_model(model).state_dict(), args.save)


if __name__ == "__main__":
    main()
