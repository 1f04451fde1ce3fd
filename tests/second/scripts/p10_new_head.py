"""Fine-tunes a (here: random) backbone on a task with another number of classes."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Backbone(nn.Module):
    def __init__(self, classes=100):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.body(x))


def wine():
    d = load_wine()
    x = torch.tensor(d.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    return TensorDataset(x[:176], torch.tensor(d.target[:176]))


def main(epochs=4):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Backbone(), find_unused_parameters=True)
    model.module.head = nn.Linear(32, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = wine()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
