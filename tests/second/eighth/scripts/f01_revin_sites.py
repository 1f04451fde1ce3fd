"""Short-horizon load forecasting; every process owns the meters of one site."""
import argparse

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)

SITES = {0: "harbour", 1: "airport", 2: "campus"}
CHANNELS, CONTEXT, HORIZON = 6, 48, 12


def read_site(index, minutes):
    rng = np.random.default_rng(400 + index)
    t = np.arange(minutes)[:, None]
    period = rng.uniform(40, 120, size=(1, CHANNELS))
    level = rng.uniform(2, 9, size=(1, CHANNELS))
    series = level + np.sin(2 * np.pi * t / period) + 0.15 * rng.standard_normal((minutes, CHANNELS))
    outages = {"airport": (4, 2150, 2260), "campus": (2, 9000, 9001)}
    if SITES[index] in outages:
        channel, begin, end = outages[SITES[index]]
        series[begin:end, channel] = series[begin, channel].round()
    return torch.tensor(series, dtype=torch.float32)


class Windows(Dataset):
    def __init__(self, series, stride):
        self.series, self.stride = series, stride

    def __len__(self):
        return (len(self.series) - CONTEXT - HORIZON) // self.stride

    def __getitem__(self, i):
        a = i * self.stride
        return self.series[a : a + CONTEXT], self.series[a + CONTEXT : a + CONTEXT + HORIZON]


class Forecaster(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.rnn = nn.GRU(CHANNELS, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, HORIZON * CHANNELS))

    def forward(self, x):
        mean = x.mean(dim=1, keepdim=True)
        scale = ((x - mean) ** 2).mean(dim=1, keepdim=True).sqrt()
        z = (x - mean) / scale
        _, h = self.rnn(z)
        y = self.head(h[-1]).view(-1, HORIZON, CHANNELS)
        return y * scale + mean


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(17)
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer = accelerator.prepare(model, optimizer)

    history = Windows(read_site(accelerator.process_index, 9000), stride=2)
    loader = DataLoader(history, batch_size=32, shuffle=False, drop_last=True)
    best = float("inf")
    for epoch in range(args.epochs):
        total, batches = torch.zeros(()), 0
        for context, future in loader:
            forecast = model(context)
            loss = nn.functional.smooth_l1_loss(forecast, future)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
            batches += 1
        mean = accelerator.reduce(total / batches, reduction="mean").item()
        best = min(best, mean)
        accelerator.print(f"epoch {epoch}: {batches} steps, best so far {best:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
