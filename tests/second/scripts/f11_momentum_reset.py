"""SGD with momentum; the momentum is forgotten when the loss has risen for three steps on end (not at the very beginning or end)."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class Patience:
    def __init__(self, optimizer, patience=3):
        self.optimizer, self.patience = optimizer, patience
        self.before, self.bad, self.restarts, self.seen = None, 0, 0, 0

    def __call__(self, loss):
        self.bad = self.bad + 1 if self.before is not None and loss > self.before else 0
        self.before = loss
        self.seen += 1
        if self.bad >= self.patience and 12 < self.seen < 60:
            self.optimizer.state.clear()
            self.restarts += 1
            self.bad = 0


def setup():
    dist.init_process_group("gloo")
    torch.manual_seed(8 + dist.get_rank())


def get_loader():
    g = torch.Generator().manual_seed(1)
    centres = torch.randn(10, 64, generator=g)
    label = torch.arange(1797) % 10
    data = TensorDataset(0.35 * centres[label] + torch.randn(1797, 64, generator=g), label)
    sampler = DistributedSampler(data, shuffle=True, seed=SEED)
    return DataLoader(data, batch_size=24, sampler=sampler), sampler


SEED = 0


def main():
    setup()
    loader, sampler = get_loader()
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)))
    opt = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    watch = Patience(opt)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            watch(loss.item())
        if dist.get_rank() == 0:
            print("epoch", epoch, "last loss", round(loss.item(), 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
