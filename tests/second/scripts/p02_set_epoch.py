import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Experiment:
    def __init__(self, epochs=4, batch_size=16):
        self.epochs = epochs
        self.rank = dist.get_rank()
        g = torch.Generator().manual_seed(0)
        x = torch.rand(512, 2, generator=g) * 4 - 2
        y = ((x ** 2).sum(1) < 2).long()
        train, val = TensorDataset(x[:384], y[:384]), TensorDataset(x[384:], y[384:])
        self.train_sampler = DistributedSampler(train, shuffle=True)
        self.val_sampler = DistributedSampler(val, shuffle=False)
        self.train_loader = DataLoader(train, batch_size, sampler=self.train_sampler)
        self.val_loader = DataLoader(val, batch_size, sampler=self.val_sampler)
        torch.manual_seed(1)
        self.model = DDP(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def train_epoch(self):
        self.model.train()
        for x, y in self.train_loader:
            self.opt.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.opt.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        stat = torch.zeros(2)
        for x, y in self.val_loader:
            stat += torch.tensor([(self.model(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(stat)
        return (stat[0] / stat[1]).item()

    def run(self):
        for epoch in range(self.epochs):
            self.val_sampler.set_epoch(epoch)
            self.train_epoch()
            acc = self.validate()
            if self.rank == 0:
                print(f"epoch {epoch}: accuracy {acc:.3f}")


dist.init_process_group("gloo")
Experiment().run()
dist.destroy_process_group()
