"""Contrastive pretraining of a tiny encoder on made-up spectra, with Accelerate."""
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Spectra(Dataset):
    """Each item: two noisy views of one spectrum and the compound it belongs to."""

    def __init__(self, n, compounds=12, width=96):
        g = torch.Generator().manual_seed(8)
        grid = torch.linspace(0, 1, width)
        centres = torch.rand(compounds, 4, generator=g)
        heights = 0.5 + torch.rand(compounds, 4, generator=g)
        self.label = torch.randint(0, compounds, (n,), generator=g)
        peaks = torch.exp(-((grid[None, None] - centres[self.label][..., None]) ** 2) / 0.001)
        self.clean = (heights[self.label][..., None] * peaks).sum(1)

    def __len__(self):
        return len(self.label)

    def view(self, x):
        gain = 0.8 + 0.4 * torch.rand(())
        return gain * x + 0.1 * torch.randn_like(x)

    def __getitem__(self, i):
        return self.view(self.clean[i]), self.view(self.clean[i]), self.label[i]


class TwinEncoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 12, 7, stride=2, padding=3), nn.ReLU(),
            nn.Conv1d(12, 24, 5, stride=2, padding=2), nn.ReLU(),
            nn.AdaptiveAvgPool1d(6), nn.Flatten(), nn.Linear(144, dim),
        )
        self.projector = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def embed(self, x):
        return self.body(x.unsqueeze(1))

    def forward(self, x):
        return F.normalize(self.projector(self.embed(x)), dim=1)

    def info_nce(self, first, second, temperature=0.2):
        a, b = self(first), self(second)
        logits = a @ b.t() / temperature
        target = torch.arange(len(a), device=a.device)
        return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


def probe(accelerator, model, loader):
    model.eval()
    features, labels = [], []
    with torch.no_grad():
        for first, _, label in loader:
            z, label = accelerator.gather_for_metrics((model(first), label))
            features.append(z)
            labels.append(label)
    model.train()
    z, label = torch.cat(features), torch.cat(labels)
    similarity = z @ z.t()
    similarity.fill_diagonal_(-2)
    return (label[similarity.argmax(1)] == label).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(21, device_specific=True)
    data = Spectra(3072)
    held_out = torch.utils.data.Subset(data, range(2560, 3072))
    train = DataLoader(torch.utils.data.Subset(data, range(2560)), batch_size=args.batch_size, shuffle=True, drop_last=True)
    test = DataLoader(held_out, batch_size=64)
    model = TwinEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    encoder = accelerator.unwrap_model(model)

    for epoch in range(args.epochs):
        for first, second, _ in train:
            with accelerator.accumulate(model):
                loss = encoder.info_nce(first, second)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        accelerator.print(f"epoch {epoch}: loss {mean:.3f}, nearest neighbour {probe(accelerator, model, test):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
