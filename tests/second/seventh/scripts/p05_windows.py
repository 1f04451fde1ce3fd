"""DDP with micro-batches: an iterator of windows, one optimizer step a window. Next-value prediction on waves."""
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    def __init__(self, count, length=40):
        self.count, self.length = count, length

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        f, phase = torch.rand(2, generator=g)
        t = torch.arange(self.length + 1)
        wave = torch.sin((0.1 + f) * t + 6.28 * phase) + 0.05 * torch.randn(len(t), generator=g)
        return wave[:-1, None], wave[1:, None]


class Forecaster(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.rnn = nn.LSTM(1, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def windows(iterable, size):
    iterator = iter(iterable)
    while window := list(islice(iterator, size)):
        yield window


class Trainer:
    window = 8

    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.criterion = nn.SmoothL1Loss()

    def micro(self, x, y, last):
        with nullcontext() if last else self.model.no_sync():
            loss = self.criterion(self.model(x), y)
            loss.mul(1.0 / self.window).backward()
        return loss.detach()

    def epoch(self, loader):
        total = torch.zeros(2)
        for window in windows(loader, self.window):
            for k, (x, y) in enumerate(window, start=1):
                total += torch.stack([self.micro(x, y, last=k == len(window)), torch.tensor(1.0)])
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    trainer = Trainer(DistributedDataParallel(Forecaster()), lr=3e-3)
    data = Waves(2 * 16 * 45)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(12):
        sampler.set_epoch(epoch)
        loss = trainer.epoch(loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch:2d} loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
