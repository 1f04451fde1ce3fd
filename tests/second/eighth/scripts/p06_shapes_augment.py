"""Small convolutional net on drawn shapes, with augmentation in loader processes; DDP."""
import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)

SIZE, KINDS = 20, 4
SEED = 606


class Shapes(Dataset):
    def __init__(self, n, train):
        self.train = train
        rng = np.random.default_rng(1 if train else 2)
        self.kind = rng.integers(0, KINDS, n)
        yy, xx = np.mgrid[:SIZE, :SIZE]
        images = []
        for kind in self.kind:
            cy, cx, r = rng.uniform(7, 13), rng.uniform(7, 13), rng.uniform(3, 6)
            dy, dx = np.abs(yy - cy), np.abs(xx - cx)
            inside = [np.hypot(dy, dx) < r, np.maximum(dy, dx) < r * 0.9, dy + dx < r * 1.2, np.minimum(dy, dx) < r * 0.35][kind]
            images.append(inside * rng.uniform(0.5, 1.0) + 0.25 * rng.standard_normal((SIZE, SIZE)))
        self.images = np.stack(images).astype(np.float32)

    def __len__(self):
        return len(self.kind)

    def augment(self, image):
        if np.random.rand() < 0.5:
            image = image[:, ::-1]
        image = np.roll(image, np.random.randint(-3, 4, size=2), axis=(0, 1))
        top, left = np.random.randint(0, SIZE - 5, size=2)
        image = image.copy()
        image[top : top + 5, left : left + 5] = 0
        return image * np.float32(np.random.uniform(0.7, 1.3))

    def __getitem__(self, i):
        image = self.images[i]
        if self.train:
            image = self.augment(image)
        return torch.from_numpy(image[None]), int(self.kind[i])


def seed_worker(worker_id):
    info = torch.utils.data.get_worker_info()
    np.random.seed(SEED + info.num_workers * seed_worker.epoch + worker_id)


seed_worker.epoch = 0


def make_net():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.GroupNorm(3, 24), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(24 * 25, KINDS),
    )


@torch.no_grad()
def accuracy(net, data, rank, world):
    net.eval()
    mine = list(range(rank, len(data), world))
    tally = torch.zeros(2, dtype=torch.float64)
    for at in range(0, len(mine), 64):
        images, kinds = zip(*(data[i] for i in mine[at : at + 64]))
        tally[0] += (net(torch.stack(images)).argmax(1) == torch.tensor(kinds)).sum()
        tally[1] += len(kinds)
    dist.all_reduce(tally)
    net.train()
    return (tally[0] / tally[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED + rank)
    train, test = Shapes(2560, train=True), Shapes(400, train=False)
    sampler = DistributedSampler(train, seed=SEED)
    loader = DataLoader(train, batch_size=16, sampler=sampler, num_workers=args.workers, worker_init_fn=seed_worker)
    net = DDP(make_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        seed_worker.epoch = epoch
        for images, kinds in loader:
            loss = nn.functional.cross_entropy(net(images), kinds)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        score = accuracy(net.module, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {score:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
