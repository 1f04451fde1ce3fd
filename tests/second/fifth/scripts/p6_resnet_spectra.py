"""1-d ResNet on spectra measured by several instruments; DDP, sharded validation."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def spectra(n, length, classes, seed):
    g = torch.Generator().manual_seed(seed)
    peaks = torch.Generator().manual_seed(77)
    centres = torch.rand(classes, 4, generator=peaks) * length
    y = torch.randint(classes, (n,), generator=g)
    axis = torch.arange(length)
    lines = torch.exp(-((axis[None, None] - centres[y][:, :, None]) / 3) ** 2).sum(1)
    gain = 0.5 + 2 * torch.rand(n, 1, generator=g)
    return TensorDataset((gain * lines + 0.5 * torch.randn(n, length, generator=g))[:, None], y)


class Residual(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.one, self.two = nn.Conv1d(i, o, 5, stride, 2, bias=False), nn.Conv1d(o, o, 5, 1, 2, bias=False)
        self.n1, self.n2 = nn.BatchNorm1d(o), nn.BatchNorm1d(o)
        self.skip = nn.Conv1d(i, o, 1, stride)

    def forward(self, x):
        return F.relu(self.n2(self.two(F.relu(self.n1(self.one(x))))) + self.skip(x))


class SpectrumNet(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(1, width, 7, 2, 3), nn.BatchNorm1d(width), nn.ReLU())
        self.body = nn.Sequential(Residual(width, width, 1), Residual(width, 2 * width, 2),
                                  Residual(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean(-1))


class Experiment:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        self.net = SpectrumNet(args.width, 10)
        self.ddp = DDP(self.net, broadcast_buffers=False, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
        train = spectra(args.samples, 256, 10, seed=1)
        self.sampler = DistributedSampler(train, drop_last=True)
        self.train_loader = DataLoader(train, args.batch_size, sampler=self.sampler, drop_last=True)
        val = spectra(768, 256, 10, seed=2)
        self.val_loader = DataLoader(val, 64, sampler=DistributedSampler(val, shuffle=False))

    def train(self, epoch):
        self.net.train()
        self.sampler.set_epoch(epoch)
        for x, y in self.train_loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.ddp(x), y).backward()
            self.optimizer.step()

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        sums = torch.zeros(3)
        for x, y in self.val_loader:
            out = self.net(x)
            sums[0] += F.cross_entropy(out, y, reduction="sum")
            sums[1] += (out.argmax(1) == y).sum()
            sums[2] += len(y)
        dist.all_reduce(sums)
        return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()

    def run(self):
        best = 0.0
        for epoch in range(self.args.epochs):
            self.train(epoch)
            loss, accuracy = self.validate()
            if self.rank == 0:
                print(f"epoch {epoch}: val loss {loss:.4f} accuracy {accuracy:.3f}", flush=True)
                if accuracy > best:
                    torch.save(self.net.state_dict(), "best.pt")
            best = max(best, accuracy)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--samples", type=int, default=3072)
    p.add_argument("--batch-size", type=int, default=24)
    p.add_argument("--width", type=int, default=24)
    p.add_argument("--lr", type=float, default=0.02)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    Experiment(args).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
