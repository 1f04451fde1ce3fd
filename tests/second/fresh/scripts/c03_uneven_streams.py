"""Attention on streams of other lengths; ranks agree on the steps, short streams begin anew."""
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, WIDTH = 30, 16


class Stream:
    """Shuffles its own lines anew each time it begins."""

    def __init__(self, rank, batches, size=8):
        self.g = torch.Generator().manual_seed(rank)
        self.data = torch.randint(1, VOCAB, (batches * size, 9), generator=self.g)
        self.size, self.passes = size, 0
        self.cache = {}
        self.iterator = iter(())

    def __len__(self):
        return len(self.data) // self.size

    def widths(self, i):
        try:
            return self.cache[i]
        except KeyError:                # first time that this line is seen
            self.cache[i] = 3 + i % 7
            return self.cache[i]

    def next(self):
        try:
            rows = next(self.iterator)
        except StopIteration:
            self.passes += 1
            order = torch.randperm(len(self.data), generator=self.g)
            self.iterator = iter(order.split(self.size))
            rows = next(self.iterator)
        ids = self.data[rows].clone()
        for k, i in enumerate(rows.tolist()):
            ids[k, self.widths(i):] = 0
        return ids


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, ids):
        keep = ids != 0                 # never empty: three tokens at least
        q, k, v = self.qkv(self.emb(ids)).chunk(3, -1)
        score = q @ k.transpose(1, 2) / math.sqrt(WIDTH)
        score = score.masked_fill(~keep[:, None, :], -math.inf)
        h = score.softmax(-1) @ v
        h = (h * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)
        return self.out(h)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Attend())
    stream = Stream(rank, batches=(40, 52, 61)[rank % 3])
    length = torch.tensor([len(stream)])
    dist.all_reduce(length, op=dist.ReduceOp.MAX)       # so many batches are an epoch
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(2):
        for _ in range(int(length)):
            ids = stream.next()
            target = ((ids > 15).sum(1) > (ids != 0).sum(1) / 2).long()
            loss = F.cross_entropy(model(ids), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.02)
        print(f"[{rank}] epoch {epoch} loss {loss.item():.3f} pass {stream.passes}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
