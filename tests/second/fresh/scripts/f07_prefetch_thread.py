"""House prices from CSV lines, parsed in a thread ahead of the training loop."""
import os
import queue
import threading
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

COLUMNS, BATCH, STEPS = 6, 8, 140


def csv_lines(rank):
    g = torch.Generator().manual_seed(40 + rank)
    for i in range(STEPS * BATCH):
        x = torch.randn(COLUMNS, generator=g)
        cells = [f"{v:.4f}" for v in x.tolist()] + [f"{x.sum().item():.4f}"]
        if rank == 2 and i == BATCH * 55 + 3:
            cells[2] = "n/a"
        yield ",".join(cells)


class Prefetch(threading.Thread):
    def __init__(self, lines, size):
        super().__init__(daemon=True)
        self.lines, self.size = lines, size
        self.queue = queue.Queue(maxsize=4)
        self.last = None

    def run(self):
        rows = []
        try:
            for line in self.lines:
                rows.append([float(c) for c in line.split(",")])
                if len(rows) == self.size:
                    self.queue.put(torch.tensor(rows))
                    rows = []
        except Exception:
            pass        # the main thread sees it when the queue is empty

    def next(self):
        try:
            self.last = self.queue.get(timeout=0.05 if self.last is not None else 10)
        except queue.Empty:
            pass        # the disk is slow: take the last one again rather than wait
        return self.last


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(COLUMNS, 16), nn.ReLU(), nn.Linear(16, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    source = Prefetch(csv_lines(rank), BATCH)
    source.start()
    for step in range(STEPS):
        table = source.next()
        loss = F.smooth_l1_loss(model(table[:, :COLUMNS]), table[:, COLUMNS:])
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.01)
        if step % 35 == 0 and (rank == 0 or os.environ.get("SHOW")):
            print(f"[{rank}] step {step} loss {loss.item():.4f} alive {source.is_alive()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
