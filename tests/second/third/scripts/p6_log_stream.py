"""Next-event prediction on a stream of log files, read by loader processes."""

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

EVENTS, CONTEXT = 64, 24


def read_log(number):
    """The events of one log file."""
    rng = random.Random(number)
    a, b = rng.choice([3, 5, 7]), rng.choice([1, 11, 17])
    event = rng.randrange(EVENTS)
    for _ in range(400):
        yield event
        event = (a * event + b) % EVENTS if rng.random() < 0.85 else rng.randrange(EVENTS)


class LogStream(IterableDataset):
    def __init__(self, files, seed=0, buffer=256):
        self.files, self.seed, self.buffer = files, seed, buffer
        self.passes = 0

    def windows(self, files):
        for number in files:
            events = list(read_log(number))
            for start in range(0, len(events) - CONTEXT - 1, CONTEXT // 2):
                chunk = torch.tensor(events[start : start + CONTEXT + 1])
                yield chunk[:-1], chunk[1:]

    def shuffled(self, items, rng):
        held = []
        for item in items:
            held.append(item)
            if len(held) >= self.buffer:
                yield held.pop(rng.randrange(len(held)))
        rng.shuffle(held)
        yield from held

    def __iter__(self):
        rng = random.Random(self.seed + self.passes)
        self.passes += 1
        files = list(range(self.files))
        rng.shuffle(files)
        worker = get_worker_info()
        if worker is not None:
            files = files[worker.id :: worker.num_workers]
        yield from self.shuffled(self.windows(files), rng)


class EventModel(nn.Module):
    def __init__(self, dim=96):
        super().__init__()
        self.embed = nn.Embedding(EVENTS, dim)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, EVENTS)

    def forward(self, events):
        return self.out(self.rnn(self.embed(events))[0])


def forever(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--files", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(4)
    stream = LogStream(args.files)
    loader = DataLoader(
        stream, args.batch_size, num_workers=args.workers, persistent_workers=args.workers > 0, drop_last=True
    )
    model = DDP(EventModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=50)

    for step, (events, following) in enumerate(forever(loader), start=1):
        logits = model(events)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        if step % 100 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {shown.item() / dist.get_world_size():.4f}", flush=True)
        if step == args.steps:
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
