#!/usr/bin/env python
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= size


def run(rank, size):
    g = torch.Generator().manual_seed(5)
    seq = torch.randn(384, 12, 3, generator=g)
    label = seq.cumsum(1).abs().amax(dim=(1, 2)).unsqueeze(1)
    data = TensorDataset(seq, label)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    torch.manual_seed(5)
    rnn, head = nn.LSTM(3, 24, batch_first=True), nn.Linear(24, 1)
    model = nn.ModuleList([rnn, head])
    for t in model.state_dict().values():
        dist.broadcast(t, 0)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        epoch_loss = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            out = head(rnn(x)[0][:, -1])
            loss = nn.functional.mse_loss(out, y)
            epoch_loss += loss.item()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            average_gradients(model)
            optimizer.step()
        print("Rank", rank, "epoch", epoch, ":", round(epoch_loss / len(loader), 4))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.destroy_process_group()
