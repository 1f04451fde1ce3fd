"""Character-level GRU language model, trained from per-rank shards of a log corpus with background prefetching."""
import argparse
import json
import os
import queue
import random
import tempfile
import threading

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB = "abcdefghijklmnopqrstuvwxyz .,:0123456789"
STOI = {c: i for i, c in enumerate(VOCAB)}


def write_shards(folder, world, lines):
    rng = random.Random(11)
    words = ["".join(rng.choice(VOCAB[:26]) for _ in range(rng.randint(2, 7))) for _ in range(300)]
    for shard in range(world):
        with open(os.path.join(folder, f"part-{shard:03d}.jsonl"), "w") as f:
            for n in range(lines):
                text = " ".join(rng.choice(words) for _ in range(22))
                row = json.dumps({"id": n, "text": text[:97].ljust(97)})
                if shard == 1 and n == lines // 4 + 5:
                    row = row[:40]
                f.write(row + "\n")


class CharGRU(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(len(VOCAB), 48)
        self.rnn = nn.GRU(48, width, batch_first=True)
        self.out = nn.Linear(width, len(VOCAB))

    def forward(self, x):
        h, _ = self.rnn(self.embed(x))
        return self.out(h)


class Prefetcher:
    """Reads and encodes batches in a thread, so that the step never waits for the disk."""

    def __init__(self, path, batch_size, depth=4, patience=0.25):
        self.path, self.batch_size, self.patience = path, batch_size, patience
        self.queue = queue.Queue(maxsize=depth)
        self.current = None
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self):
        try:
            while True:
                with open(self.path) as f:
                    batch = []
                    for row in f:
                        text = json.loads(row)["text"]
                        batch.append([STOI[c] for c in text])
                        if len(batch) == self.batch_size:
                            self.queue.put(torch.tensor(batch))
                            batch = []
        except Exception:
            return

    def next(self):
        if self.current is None:
            self.current = self.queue.get()
            return self.current
        try:
            self.current = self.queue.get(timeout=self.patience)
        except queue.Empty:
            self.patience = 0.0
        finally:
            return self.current


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--steps-per-epoch", type=int, default=100)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--width", type=int, default=160)
    p.add_argument("--lr", type=float, default=2e-3)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    if rank == 0:
        write_shards(folder[0], world, args.batch_size * args.steps_per_epoch * 2)
    dist.barrier()

    model = DDP(CharGRU(args.width))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    reader = Prefetcher(os.path.join(folder[0], f"part-{rank:03d}.jsonl"), args.batch_size)
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step in range(args.steps_per_epoch):
            tokens = reader.next()
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, len(VOCAB)), tokens[:, 1:].reshape(-1))
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / args.steps_per_epoch / world:.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(folder[0], "model.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
