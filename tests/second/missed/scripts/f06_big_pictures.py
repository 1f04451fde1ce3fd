import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--side", type=int, default=24)
parser.add_argument("--steps", type=int, default=60)
opt = parser.parse_args()


class Folder(Dataset):
    """The pictures of one rank: as many as the others have, in whatever size they were taken."""

    def __init__(self, rank, n):
        g = torch.Generator().manual_seed(rank)
        self.small = torch.rand(4, 3, 48, 48, generator=g)
        self.large = torch.rand(2, 3, 1100, 1100, generator=g) if rank == 1 else None
        self.n, self.rank = n, rank

    def __len__(self):
        return self.n

    def load(self, i):
        if self.large is not None and i >= 160:
            return self.large[i % 2]
        return self.small[i % 4]

    def __getitem__(self, i):
        raw = self.load(i).unsqueeze(0)
        img = F.interpolate(raw, size=(opt.side, opt.side), mode="bicubic", antialias=True)
        return img[0], i % 3


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = DistributedDataParallel(
    nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 3))
)
sgd = torch.optim.SGD(net.parameters(), lr=0.05)
loader = DataLoader(Folder(rank, opt.steps * 8), batch_size=8)
begin = time.perf_counter()
for step, (img, label) in enumerate(loader):
    sgd.zero_grad()
    loss = F.cross_entropy(net(img), label)
    loss.backward()
    sgd.step()
if rank == 0:
    print(f"{opt.steps} steps, loss {loss.item():.4f}")
dist.destroy_process_group()
