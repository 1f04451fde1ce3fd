"""Self-supervised contrastive pre-training (SimSiam style) on synthetic shapes; DDP, numpy augmentation."""
import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class ViewMaker:
    """Crop, flip, brightness and noise."""

    def __init__(self, size, seed):
        self.size = size
        self.rng = np.random.Generator(np.random.PCG64(seed))

    def view(self, image):
        top, left = self.rng.integers(0, image.shape[0] - self.size + 1, 2)
        out = image[top:top + self.size, left:left + self.size]
        if self.rng.random() < 0.5:
            out = out[:, ::-1]
        gain = self.rng.uniform(0.6, 1.4)
        return (out * gain + self.rng.normal(0, 0.15, out.shape)).astype(np.float32)


class Pairs(Dataset):
    def __init__(self, images, views):
        self.images, self.views = images, views

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        return torch.from_numpy(self.views.view(image))[None], torch.from_numpy(self.views.view(image))[None]


def make_images(n, size, seed):
    rng = np.random.default_rng(seed)
    yy, xx = np.mgrid[:size, :size] / size
    fx, fy, ph = rng.uniform(1, 9, (3, n, 1, 1))
    return (np.sin(fx * 2 * xx * np.pi + ph) * np.cos(fy * 2 * yy * np.pi)).astype(np.float32)


class SimSiam(nn.Module):
    def __init__(self, width, dim):
        super().__init__()
        def block(i, o):
            return [nn.Conv2d(i, o, 3, stride=2, padding=1), nn.GroupNorm(4, o), nn.ReLU()]
        self.encoder = nn.Sequential(*block(1, width), *block(width, 2 * width), *block(2 * width, 4 * width),
                                     nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, dim))
        self.predictor = nn.Sequential(nn.Linear(dim, dim // 2), nn.LayerNorm(dim // 2), nn.ReLU(),
                                       nn.Linear(dim // 2, dim))

    def forward(self, a, b):
        za, zb = self.encoder(a), self.encoder(b)
        return self.predictor(za), self.predictor(zb), za.detach(), zb.detach()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--samples", type=int, default=3072)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--width", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--seed", type=int, default=42)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed + dist.get_rank())

    views = ViewMaker(32, args.seed)
    data = Pairs(make_images(args.samples, 40, seed=args.seed), views)
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(SimSiam(args.width, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        similar = 0.0
        for a, b in loader:
            pa, pb, za, zb = model(a, b)
            loss = -(F.cosine_similarity(pa, zb).mean() + F.cosine_similarity(pb, za).mean()) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            similar -= loss.item()
        value = torch.tensor(similar / len(loader))
        dist.all_reduce(value)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: similarity {value.item() / dist.get_world_size():.4f}", flush=True)
            torch.save(model.module.encoder.state_dict(), "encoder.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
