"""Signal denoiser; comes from a SLURM cluster."""
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Cluster:
    """Where this process stands, as the batch system says."""
    rank: int = int(os.environ.get("SLURM_PROCID", 0))
    size: int = int(os.environ.get("SLURM_NTASKS", 1))
    local: int = int(os.environ.get("SLURM_LOCALID", 0))


class Noisy(Dataset):
    def __init__(self, n=960, width=32):
        g = torch.Generator().manual_seed(11)
        phase = torch.rand(n, 1, generator=g) * 6.28
        self.clean = torch.sin(torch.arange(width) / 4 + phase)
        self.noisy = self.clean + 0.3 * torch.randn(n, width, generator=g)

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        return self.noisy[i], self.clean[i]


def make_loader(data, cluster, batch_size):
    sampler = DistributedSampler(data, num_replicas=cluster.size, rank=cluster.rank,
                                 shuffle=True, seed=5, drop_last=True)
    return DataLoader(data, batch_size=batch_size, sampler=sampler), sampler


def main():
    cluster = Cluster()
    dist.init_process_group("gloo")     # env:// works everywhere
    main_process = dist.get_rank() == 0
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 32)))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader, sampler = make_loader(Noisy(), cluster, batch_size=16)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total, count = torch.zeros(()), 0
        for noisy, clean in loader:
            loss = F.mse_loss(model(noisy), clean)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
            count += 1
            time.sleep(0.02)
        total /= count
        dist.all_reduce(total)
        if main_process:
            print(f"epoch {epoch}: {total.item() / dist.get_world_size():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
