"""Trains on pickled, gzipped shards, one a rank; shards may differ by a batch or two, so Join."""
import gzip
import os
import pickle
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

RECORDS, BATCH = 130, 16


def fetch_shard(rank, folder):
    """Stands for the download from the bucket; that of shard 1 was cut off."""
    path = os.path.join(folder, f"shard-{rank}.pkl.gz")
    rng = np.random.default_rng(rank)
    with gzip.open(path, "wb") as f:
        for _ in range(RECORDS + rank % 2):
            x = rng.normal(size=(BATCH, 8)).astype("float32")
            pickle.dump((x, (x.sum(1) > 0).astype("int64")), f)
    if rank == 1:
        os.truncate(path, os.path.getsize(path) * 45 // 100)
    return path


def read(path):
    with gzip.open(path, "rb") as f:
        while True:
            try:
                x, y = pickle.load(f)
            except EOFError:
                return
            yield torch.from_numpy(x), torch.from_numpy(y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as folder:
        path = fetch_shard(rank, folder)
        dist.barrier()
        steps = 0
        with Join([model]):
            for x, y in read(path):
                loss = F.cross_entropy(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                steps += 1
                time.sleep(0.02)
                if rank == 0 and steps % 40 == 0:
                    print(f"step {steps}: {loss.item():.4f}", flush=True)
    if os.environ.get("SHOW"):
        print(rank, "steps", steps, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
