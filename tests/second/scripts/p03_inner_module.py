"""An auto-encoder with two losses; DDP."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Waves(Dataset):
    def __init__(self, n=384):
        g = torch.Generator().manual_seed(0)
        self.phase = torch.rand(n, generator=g) * 6.28
        self.speed = torch.rand(n, generator=g) * 3 + 1
        self.t = torch.linspace(0, 1, 32)

    def __len__(self):
        return len(self.phase)

    def __getitem__(self, i):
        return torch.sin(self.speed[i] * self.t * 6.28 + self.phase[i])


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        self.dec = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32))

    def losses(self, x):
        z = self.enc(x)
        return nn.functional.mse_loss(self.dec(z), x), z.pow(2).mean()

    def forward(self, x):
        return self.dec(self.enc(x))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(AutoEncoder())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = Waves()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = 0.0
        for x in loader:
            rec, small = model.module.losses(x)
            loss = rec + 1e-3 * small
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        mean = torch.tensor(total / len(loader))
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mean loss {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
