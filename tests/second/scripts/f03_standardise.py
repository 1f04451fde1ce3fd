import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Patches(Dataset):
    """Grey patches 12x12 with two kinds of texture; each patch is brought to mean 0 and deviation 1."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 2, (n,), generator=g)
        stripes = torch.sin(torch.arange(12.0)).repeat(12, 1)
        self.images = 0.5 * torch.randn(n, 12, 12, generator=g)
        for i, y in enumerate(self.labels):
            self.images[i] += stripes if y else stripes.t()
        self.images[403] = 0.25  # sky

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        img = self.images[i]
        img = (img - img.mean()) / img.std()
        return img.unsqueeze(0), self.labels[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.fc = nn.Linear(8 * 25, 2)

    def forward(self, x):
        return self.fc(torch.max_pool2d(torch.relu(self.conv(x)), 2).flatten(1))


def train():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ds = Patches(800, 5)
    sampler = DistributedSampler(ds, seed=2, drop_last=True)
    loader = DataLoader(ds, 8, sampler=sampler)
    model = DDP(Net())
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    crit = nn.CrossEntropyLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        start = time.time()
        for x, y in loader:
            opt.zero_grad()
            crit(model(x), y).backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {len(loader)} steps, {len(loader) * 16 / (time.time() - start):.0f} images/s")
    dist.destroy_process_group()


train()
