"""Denoising; each picture is shifted, flipped and made noisy anew each time it is read."""
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Squares(Dataset):
    def __init__(self, n=320):
        rng = np.random.default_rng(0)
        self.images = np.zeros((n, 12, 12), dtype=np.float32)
        for img in self.images:
            r, c, s = rng.integers(0, 8), rng.integers(0, 8), rng.integers(2, 5)
            img[r : r + s, c : c + s] = 1

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        img = self.images[i]
        if random.random() < 0.5:
            img = img[:, ::-1]
        img = np.roll(img, np.random.randint(-2, 3), axis=0)
        noisy = img + 0.3 * np.random.standard_normal(img.shape)
        return noisy.astype(np.float32), np.ascontiguousarray(img)


seed_everything(2024)
dist.init_process_group("gloo")
dataset = Squares()
sampler = DistributedSampler(dataset, shuffle=True, seed=2024)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 144)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for noisy, clean in loader:
        loss = nn.functional.mse_loss(model(noisy), clean.flatten(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {loss.item():.4f}")
dist.destroy_process_group()
