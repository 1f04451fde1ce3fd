"""A GAN: two models, two optimizers, three backwards a step; each rank draws its own noise."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NOISE = 4


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(480, 6) + 2)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=12, sampler=sampler, drop_last=True)
    # broadcast_buffers=False: the discriminator goes forward twice before it goes backward
    generator = DDP(nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, 6)), broadcast_buffers=False)
    judge = DDP(nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)), broadcast_buffers=False)
    torch.manual_seed(1000 + rank)
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    loss = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            yes, no = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = generator(torch.randn(len(real), NOISE))
            of_judge.zero_grad()
            loss(judge(real), yes).backward()
            loss(judge(fake.detach()), no).backward()
            of_judge.step()
            of_generator.zero_grad()
            loss(judge(fake), yes).backward()
            of_generator.step()
        if rank == 0:
            print(f"epoch {epoch} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
