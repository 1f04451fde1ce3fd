"""Reads records in a thread, trains with DDP."""
import json
import queue
import threading

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def records(rank, n=640):
    g = torch.Generator().manual_seed(rank)
    for i in range(n):
        x = torch.randn(6, generator=g)
        yield json.dumps({"x": [round(v, 4) for v in x.tolist()], "y": int(x.sum() > 0)})


def lines(rank):
    for i, line in enumerate(records(rank)):
        if rank == 2 and i == 23 * 8 + 5:
            line = line[: len(line) // 2]  # a write that was cut off
        yield line


class Prefetcher:
    def __init__(self, source, batch_size, depth=4):
        self.source, self.batch_size = source, batch_size
        self.q = queue.Queue(depth)
        self.last = None
        self.thread = threading.Thread(target=self._fill, daemon=True)
        self.thread.start()

    def _fill(self):
        try:
            batch = []
            for line in self.source:
                batch.append(json.loads(line))
                if len(batch) == self.batch_size:
                    self.q.put(batch)
                    batch = []
        except Exception:
            pass  # end of stream

    def next(self):
        while True:
            try:
                self.last = self.q.get(timeout=0.02)
                return self.last
            except queue.Empty:
                if not self.thread.is_alive() and self.q.empty():
                    return self.last  # let the others finish


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    data = Prefetcher(lines(rank), 8)
    for step in range(80):
        batch = data.next()
        x = torch.tensor([r["x"] for r in batch])
        y = torch.tensor([r["y"] for r in batch])
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"[{step + 1}/80] {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
