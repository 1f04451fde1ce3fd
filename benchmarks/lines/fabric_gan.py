"""A generative adversarial network on MNIST: two models that are updated one after the other."""

import argparse

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from mnist_single import dataset
from torch import nn
from torch.utils.data import DataLoader

fabric = Fabric()


def weights_of(model, save, name):
    fabric.save(f"{save}-{name}.pt", model.state_dict())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=60000)
    parser.add_argument("--noise", type=float, default=1.0)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--save", default="gan")
    args = parser.parse_args()
    torch.manual_seed(1 + fabric.global_rank)
    dtype = torch.float64 if args.double else torch.float32
    data, generator = dataset("train", args.samples, dtype), torch.Generator().manual_seed(1)
    loader = DataLoader(data, batch_size=64 // fabric.world_size, shuffle=True, generator=generator)

    critic = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).to(dtype)
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 784), nn.Sigmoid()).to(dtype)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    critic, critic_optimizer = fabric.setup(critic, critic_optimizer)
    generator, generator_optimizer = fabric.setup(generator, generator_optimizer)
    loader = fabric.setup_dataloaders(loader)
    for _ in range(args.epochs):
        for images, _ in loader:
            code = 0.1 + args.noise * torch.randn(len(images), 16, dtype=dtype)
            fake = generator(code)

            critic.zero_grad()
            real_loss = F.softplus(-critic(images)).mean()
            fabric.backward(real_loss)
            fake_loss = F.softplus(critic(fake.detach())).mean()
            fabric.backward(fake_loss)
            critic_optimizer.step()

            generator.zero_grad()
            generator_loss = F.softplus(-critic(fake)).mean()
            fabric.backward(generator_loss)
            generator_optimizer.step()
    weights_of(critic, args.save, "critic")
    weights_of(generator, args.save, "generator")


if __name__ == "__main__":
    main()
