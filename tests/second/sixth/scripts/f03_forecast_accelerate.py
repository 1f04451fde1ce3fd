"""Load forecasting with a GRU under Accelerate. Unusual losses are written to a log for the people who look after the data."""
import collections

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Meters(Dataset):
    """One window of 24 hours, and the hour after it, from many meters."""

    def __init__(self, count=2400):
        g = torch.Generator().manual_seed(11)
        phase = torch.rand(count, 1, generator=g) * 6.28
        hours = torch.arange(25.0)[None]
        self.series = torch.sin(hours * 0.26 + phase) + 0.1 * torch.randn(count, 25, generator=g)
        self.series[1483] *= 400  # reported in Wh, not kWh

    def __len__(self):
        return len(self.series)

    def __getitem__(self, i):
        return self.series[i, :24, None], self.series[i, 24]


class Forecaster(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.gru = nn.GRU(1, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        hidden, _ = self.gru(x)
        return self.out(hidden[:, -1]).squeeze(-1)


class SpikeLog:
    def __init__(self, accelerator, factor=30.0):
        self.accelerator, self.factor = accelerator, factor
        self.recent = collections.deque(maxlen=50)
        self.spikes = []

    def watch(self, loss, step):
        value = loss.item()
        usual = sum(self.recent) / len(self.recent) if self.recent else value
        if len(self.recent) == 50 and value > self.factor * usual:
            everywhere = self.accelerator.gather(loss.detach().reshape(1))
            self.spikes.append((step, everywhere.tolist()))
        else:
            self.recent.append(value)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(5)
    data = Meters()
    loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    spikes = SpikeLog(accelerator)
    step = 0
    for epoch in range(6):
        total = 0.0
        for window, target in loader:
            loss = F.mse_loss(model(window), target)
            spikes.watch(loss, step)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
            step += 1
        mean = accelerator.reduce(torch.tensor(total / len(loader)), "mean")
        accelerator.print(f"epoch {epoch} loss {mean.item():.4f} spikes {len(spikes.spikes)}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
