"""Rank 0 saves after each epoch, all load it again on their own device, and go on; as in PyTorch's DDP tutorial."""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def save(path, model, optimizer, epoch):
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load(path, model, optimizer):
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "checkpoint.pt"
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(330, 10, generator=generator), torch.randn(330, 5, generator=generator))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=15, sampler=sampler)
    model = DDP(ToyModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    epoch = 0
    while epoch < 2:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.MSELoss()(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            save(path, model, optimizer, epoch)
        dist.barrier()
        epoch = load(path, model, optimizer)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
