"""Train a small CNN on binary shards: each process streams its own."""

import argparse
import json
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, IterableDataset

SIDE, CLASSES = 16, 8
RECORD = 1 + 3 * SIDE * SIDE


def write_shards(folder, count, records):
    rng = np.random.default_rng(11)
    looks = rng.integers(40, 200, (CLASSES, 3 * SIDE * SIDE))
    manifest = []
    for index in range(count):
        labels = rng.integers(0, CLASSES, records)
        pixels = np.clip(looks[labels] + rng.normal(0, 45, (records, 3 * SIDE * SIDE)), 0, 255)
        payload = np.concatenate([labels[:, None], pixels], axis=1).astype(np.uint8).tobytes()
        if index == 1:
            payload = payload[: len(payload) // 3 + 100]
        path = folder / f"part-{index:05d}.bin"
        path.write_bytes(payload)
        manifest.append({"file": path.name, "records": records})
    (folder / "manifest.json").write_text(json.dumps(manifest))


class ShardStream(IterableDataset):
    def __init__(self, folder, rank, buffer=128):
        entry = json.loads((folder / "manifest.json").read_text())[rank]
        self.path, self.records, self.buffer = folder / entry["file"], entry["records"], buffer
        self.rng = random.Random(100 + rank)

    def decode(self, raw):
        image = torch.frombuffer(bytearray(raw[1:]), dtype=torch.uint8).view(3, SIDE, SIDE)
        if self.rng.random() < 0.5:
            image = image.flip(-1)
        return image.float().div(255).sub(0.5), raw[0]

    def raw_records(self):
        with self.path.open("rb") as shard:
            for _ in range(self.records):
                yield shard.read(RECORD).ljust(RECORD, b"\0")

    def __iter__(self):
        held = []
        for raw in self.raw_records():
            if len(held) < self.buffer:
                held.append(raw)
                continue
            place = self.rng.randrange(self.buffer)
            held[place], raw = raw, held[place]
            yield self.decode(raw)
        self.rng.shuffle(held)
        yield from map(self.decode, held)


def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(24, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, CLASSES),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--records", type=int, default=6400)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    where = [tempfile.mkdtemp(prefix="shards-") if rank == 0 else None]
    if rank == 0:
        write_shards(Path(where[0]), world, args.records)
    dist.broadcast_object_list(where, src=0)
    loader = DataLoader(ShardStream(Path(where[0]), rank), batch_size=args.batch_size, drop_last=True)

    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)

    for epoch in range(args.epochs):
        total, steps = torch.zeros(()), 0
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            steps += 1
        scheduler.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / steps / world:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
