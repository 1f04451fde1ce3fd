import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class History:
    def __init__(self, path):
        self.path, self.rows = path, []

    def add(self, **row):
        self.rows.append(row)
        with open(self.path, "w") as f:
            json.dump(self.rows, f, indent=1)


def main(args):
    dist.init_process_group("gloo")
    os.makedirs(args.out, exist_ok=True)
    history = History(os.path.join(args.out, "history.json"))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(480, 8, generator=g)
    data = TensorDataset(x, x.prod(1, keepdim=True).sign())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for xb, yb in loader:
            loss = nn.functional.soft_margin_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        history.add(epoch=epoch, loss=total / len(loader))
        if dist.get_rank() == 0:
            print(f"epoch {epoch} {total / len(loader):.4f}")
            torch.save(model.module.state_dict(), os.path.join(args.out, "model.pt"))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default="p07_out")
    main(parser.parse_args())
