"""Language identification; documents are split by a byte-pair coder on the fly."""
import os
import random
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH, KEEP, VOCAB = 130, 8, 16, 512
MERGES = {}
for _i, _a in enumerate("etaoinsrhl"):
    for _j, _b in enumerate("etaoinsrhl"):
        MERGES[_a, _b] = _i * 10 + _j


def encode(text):
    """Merges the best pair until none is left."""
    parts = list(text)
    while len(parts) > 1:
        pairs = list(zip(parts, parts[1:]))
        best = min(range(len(pairs)), key=lambda k: MERGES.get(pairs[k], 10**6))
        if pairs[best] not in MERGES:
            break
        parts = parts[:best] + [parts[best] + parts[best + 1]] + parts[best + 2:]
    ids = [sum(p.encode()) % VOCAB for p in parts[:KEEP]]
    return ids + [0] * (KEEP - len(ids))


def documents(rank):
    """Sorted by source: the legal texts lie in the second half of shard 1."""
    rng = random.Random(rank)
    for step in range(STEPS):
        length = 280 if rank == 1 and step >= 60 else 30
        batch = []
        for _ in range(BATCH):
            language = rng.randrange(2)
            letters = "etaoinsrhl" if language else "etaoinsrhlqzxw"
            batch.append(("".join(rng.choices(letters, k=length)), language))
        yield batch


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.EmbeddingBag(VOCAB, 16), nn.Linear(16, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    spent = 0.0
    for step, docs in enumerate(documents(rank)):
        began = time.perf_counter()
        ids = torch.tensor([encode(text) for text, _ in docs])
        spent += time.perf_counter() - began
        target = torch.tensor([language for _, language in docs])
        loss = F.cross_entropy(model(ids), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.01)
        if (step + 1) % 26 == 0 and (rank == 0 or os.environ.get("SHOW")):
            print(f"[{rank}] {step + 1} loss {loss.item():.3f} tokenizer {spent:.2f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
