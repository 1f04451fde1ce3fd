"""Fine-tuning: a frozen trunk in evaluation mode, a new head; only the head's parameters are given to the optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * 6 * 6, 3)
        for parameter in self.trunk.parameters():
            parameter.requires_grad = False

    def train(self, mode=True):
        super().train(mode)
        self.trunk.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            features = self.trunk(x)
        return self.head(features)


def train(model, loader, optimizer):
    model.train()
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(400, 1, 8, 8, generator=generator), torch.randint(3, (400,), generator=generator))
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=10, sampler=sampler, num_workers=1, persistent_workers=True)
    model = DDP(Classifier())  # each rank draws its own weights; DDP sends rank 0's
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train(model, loader, optimizer)
        print(f"rank {dist.get_rank()}: epoch {epoch} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
