"""Click-through rate from a stream of logs. Streams have unequal lengths, for which there is Join."""
import argparse
import json

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


def log_lines(part, day, count):
    """What the collector has written: a line of JSON for each impression."""
    g = torch.Generator().manual_seed(1000 * day + part)
    users = torch.randint(0, 50, (count,), generator=g).tolist()
    items = torch.randint(0, 80, (count,), generator=g).tolist()
    chance = torch.rand(count, generator=g).tolist()
    for i in range(count):
        click = int(chance[i] < 0.1 + 0.7 * ((users[i] * 7 + items[i]) % 3 == 0))
        line = json.dumps({"user": users[i], "item": items[i], "click": click})
        if day >= 1 and part == 1 and i == count // 5:
            line = line[: len(line) // 2]
        yield line


class Impressions(IterableDataset):
    def __init__(self, part, count):
        self.part, self.count, self.day = part, count, 0

    def parse(self, lines):
        try:
            for line in lines:
                record = json.loads(line)
                yield record["user"], record["item"], float(record["click"])
        except json.JSONDecodeError:
            pass  # some lines are cut off when the collector restarts

    def __iter__(self):
        return self.parse(log_lines(self.part, self.day, self.count))


class Factors(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.user = nn.Embedding(50, width)
        self.item = nn.Embedding(80, width)
        self.mlp = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, item):
        return self.mlp(torch.cat([self.user(user), self.item(item)], -1)).squeeze(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--days", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Factors())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    stream = Impressions(rank, 4800 + 64 * rank)
    loader = DataLoader(stream, batch_size=args.batch, drop_last=True)

    for day in range(args.days):
        stream.day = day
        last = 0.0
        with Join([model]):
            for user, item, click in loader:
                optimizer.zero_grad()
                loss = F.binary_cross_entropy_with_logits(model(user, item), click.float())
                loss.backward()
                optimizer.step()
                last = 0.98 * last + 0.02 * loss.item()
        if rank == 0:
            print(f"day {day} loss {last:.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "/tmp/fourth_clicks.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
