"""Galaxy morphology from fixed-size records, read ahead by a thread of our own."""
import queue
import struct
import threading
import zlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

SIDE = 12
HEADER = struct.Struct("<IB")


def make_records(rank, count):
    g = torch.Generator().manual_seed(50 + rank)
    records = []
    for i in range(count):
        kind = i % 3
        image = torch.randn(SIDE, SIDE, generator=g) * 0.5
        image[3 * kind : 3 * kind + 4, 2:9] += 1.0
        payload = (image * 20 + 128).clamp(0, 255).to(torch.uint8).numpy().tobytes()
        records.append(HEADER.pack(zlib.crc32(payload), kind) + payload)
    if rank == 1:
        broken = bytearray(records[705])
        broken[40] ^= 0x10
        records[705] = bytes(broken)
    return records


class ReadAhead:
    """Fills a small queue with batches; a None says that the epoch is over."""

    def __init__(self, records, batch, depth=4):
        self.records, self.batch, self.depth = records, batch, depth

    def decode(self, record):
        checksum, kind = HEADER.unpack_from(record)
        payload = record[HEADER.size :]
        if zlib.crc32(payload) != checksum:
            raise OSError("checksum of a record does not match")
        image = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(1, SIDE, SIDE)
        return image.float() / 20 - 6.4, kind

    def fill(self, order, out):
        for start in range(0, len(order) - self.batch + 1, self.batch):
            pairs = [self.decode(self.records[i]) for i in order[start : start + self.batch]]
            out.put((torch.stack([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs])))
        out.put(None)

    def epoch(self, generator):
        order = torch.randperm(len(self.records), generator=generator).tolist()
        # of each epoch two thirds are shown
        order = order[: 2 * len(order) // 3]
        out = queue.Queue(self.depth)
        threading.Thread(target=self.fill, args=(order, out), daemon=True).start()
        while (item := out.get()) is not None:
            yield item


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    reader = ReadAhead(make_records(rank, 1152), batch=8)
    generator = torch.Generator().manual_seed(1234 + rank)
    for epoch in range(8):
        seen = hits = 0
        for image, kind in reader.epoch(generator):
            logits = model(image)
            optimizer.zero_grad()
            F.cross_entropy(logits, kind).backward()
            optimizer.step()
            hits += (logits.argmax(1) == kind).sum().item()
            seen += len(kind)
        schedule.step()
        counts = torch.tensor([hits, seen])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch} accuracy {counts[0] / counts[1]:.4f} of {counts[1]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
