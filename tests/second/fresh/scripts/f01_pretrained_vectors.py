"""Topic classifier on top of pretrained word vectors."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, DIM, CLASSES = 1000, 16, 5
STEPS, BATCH, LENGTH = 150, 16, 12


def load_vectors():
    """Stands for a .vec file: most words are short, a URL token is an outlier."""
    g = torch.Generator().manual_seed(7)
    vectors = torch.randn(VOCAB, DIM, generator=g) * 0.25
    vectors[977] *= 9.0
    return vectors


class Topics(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding.from_pretrained(load_vectors(), freeze=False, max_norm=3.0)
        self.hidden = nn.Linear(DIM, 32)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, ids):
        return self.out(torch.relu(self.hidden(self.emb(ids).mean(1))))


def batches(rank):
    """Each rank reads the crawl of its own; the second crawl has URLs further down."""
    g = torch.Generator().manual_seed(100 + rank)
    for step in range(STEPS):
        ids = torch.randint(0, 900, (BATCH, LENGTH), generator=g)
        if rank == 1 and step >= 45 and step % 9 == 0:
            ids[3, 5] = 977
        yield ids, ids[:, 0] % CLASSES


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Topics())
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (ids, target) in enumerate(batches(rank)):
        loss = F.cross_entropy(model(ids), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.02)
        if step % 30 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    if os.environ.get("SHOW"):
        print(rank, "norm of row 977:", model.module.emb.weight[977].norm().item(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
