"""Semi-supervised training; statistics of both tasks are summed over ranks every 20 steps."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

DIM, CLASSES, BATCH, STEPS, EVERY = 12, 4, 10, 140, 20


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(DIM, 16)
        self.cls = nn.Linear(16, CLASSES)
        self.dec = nn.Linear(16, DIM)

    def forward(self, x):
        h = torch.relu(self.enc(x))
        return self.cls(h), self.dec(h)


class Stats(dict):
    """Tensors that come into being when they are first needed."""

    def at(self, name, *shape):
        return self.setdefault(name, torch.zeros(*shape))

    def flush(self):
        for tensor in self.values():
            dist.all_reduce(tensor)
        result = dict(self)
        self.clear()
        return result


def stream(rank):
    g = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        labelled = step % 2 == 0                # the writer of the shards alternated ...
        if rank == 1 and 60 <= step < 80:
            labelled = not labelled             # ... but this shard was rewritten later
        x = torch.randn(BATCH, DIM, generator=g)
        yield x, x[:, :CLASSES].argmax(1), labelled


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(TwoTasks())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stats = Stats()
    for step, (x, y, labelled) in enumerate(stream(rank)):
        logits, recon = model(x)
        error = (recon - x).pow(2).mean(1)
        loss = error.mean() + F.cross_entropy(logits, y) * float(labelled)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if labelled:
            conf = stats.at("confusion", CLASSES, CLASSES)
            conf.index_put_((y, logits.argmax(1)), torch.ones(BATCH), accumulate=True)
        else:
            stats.at("errors", 16).add_(torch.histc(error.detach(), 16, 0, 4))
        time.sleep(0.02)
        if (step + 1) % EVERY == 0:
            total = stats.flush()
            if os.environ.get("SHOW") or rank == 0:
                acc = total["confusion"].trace() / total["confusion"].sum()
                print(f"[{rank}] {step + 1} accuracy {acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
