"""Detector head on synthetic anchors, with online hard-example mining; statistics are summed over the ranks."""
import os
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

torch.set_num_threads(1)


class Anchors(Dataset):
    def __init__(self, images=3600):
        self.images = images
        self.teacher = torch.randn(24, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return self.images

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        x = torch.randn(40, 24, generator=g)
        y = (x @ self.teacher > 3.0).float()
        if index == 2228:
            y.zero_()
        return x, y


class Meter:
    def __init__(self, group):
        self.group = group
        self.totals = defaultdict(float)

    def add(self, name, pair):
        pair = pair.detach().clone()
        dist.all_reduce(pair, group=self.group)
        self.totals[name, "sum"] += pair[0].item()
        self.totals[name, "count"] += pair[1].item()

    def show(self, *names):
        values = (self.totals[n, "sum"] / max(1.0, self.totals[n, "count"]) for n in names)
        line = "  ".join(f"{n} {v:.3f}" for n, v in zip(names, values))
        self.totals.clear()
        return line


def mine(losses, targets, meter, ratio=3):
    positive = targets > 0
    if not positive.any():
        return losses.topk(8).values.mean()
    negatives = losses[~positive]
    count = min(len(negatives), ratio * int(positive.sum()))
    hard = negatives.topk(count).values
    meter.add("hard", torch.stack([hard.sum(), torch.tensor(float(count))]))
    return (losses[positive].sum() + hard.sum()) / (positive.sum() + count)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    head = DistributedDataParallel(nn.Sequential(nn.Linear(24, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
    data = Anchors()
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=1, sampler=sampler, drop_last=True)
    meter = Meter(dist.new_group())
    for epoch in range(1):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            x, y = x.flatten(0, 1), y.flatten()
            logits = head(x).squeeze(1)
            losses = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
            loss = mine(losses, y, meter)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right = ((logits > 0) == (y > 0)).sum().float()
            meter.add("accuracy", torch.stack([right, torch.tensor(float(len(y)))]))
            if step % 100 == 99:
                line = meter.show("hard", "accuracy")
                if rank == 0:
                    print(f"epoch {epoch} step {step + 1}  {line}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
