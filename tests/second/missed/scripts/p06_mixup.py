"""Small conv net on synthetic pictures; shifts and mirrors them, and mixes pairs (mixup)."""
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SIDE, CLASSES, BATCH, EPOCHS = 12, 4, 8, 3


class Pictures(Dataset):
    def __init__(self, n=640):
        g = torch.Generator().manual_seed(33)
        self.y = torch.randint(0, CLASSES, (n,), generator=g)
        self.x = 0.3 * torch.randn(n, 1, SIDE, SIDE, generator=g)
        for i, c in enumerate(self.y.tolist()):
            self.x[i, :, 3 * c:3 * c + 2] += 1.0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Augment:
    """Reproducible: what is drawn depends upon the epoch and the step only."""

    def __init__(self, seed):
        self.seed = seed

    def start(self, epoch):
        self.rng = np.random.default_rng([self.seed, epoch])

    def __call__(self, x, y):
        for i in range(len(x)):
            x[i] = torch.roll(x[i], int(self.rng.integers(-2, 3)), dims=-1)
            if self.rng.random() < 0.5:
                x[i] = x[i].flip(-1)
        lam = float(self.rng.beta(0.4, 0.4))
        other = torch.from_numpy(self.rng.permutation(len(x)))
        return lam * x + (1 - lam) * x[other], y, y[other], lam


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(150, CLASSES))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Pictures()
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)
    augment = Augment(seed=1234)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        augment.start(epoch)
        for x, y in loader:
            x, a, b, lam = augment(x, y)
            out = model(x)
            loss = lam * F.cross_entropy(out, a) + (1 - lam) * F.cross_entropy(out, b)
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.02)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
