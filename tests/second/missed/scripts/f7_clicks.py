"""Click model over a time-ordered log: each rank replays a contiguous part of the week."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

FIELDS, CARDINALITY = 12, 2000


def click_log(count, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, CARDINALITY, (count, FIELDS), generator=g)
    taste = torch.randn(CARDINALITY, generator=g)
    hour = torch.arange(count) / count * 7 * 24
    # demand over the week; the shop closes on Saturday night
    demand = 0.5 + 0.2 * torch.sin(hour / 24 * 2 * torch.pi)
    demand = torch.where((hour > 138) & (hour < 142), 0.0, demand)
    p = demand * torch.sigmoid(taste[ids].sum(1)) * 2
    return TensorDataset(ids, (torch.rand(count, generator=g) < p).float())


class ClickModel(nn.Module):
    def __init__(self, dim=24, width=1024):
        super().__init__()
        self.embed = nn.Embedding(CARDINALITY, dim)
        self.tower = nn.Sequential(
            nn.Linear(FIELDS * dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, ids):
        return self.tower(self.embed(ids).flatten(1)).squeeze(-1)


class Meter:
    """Running means of the loss, and of the recall per batch."""

    def __init__(self):
        self.loss, self.recall, self.count = 0.0, 0.0, 0

    def update(self, loss, scores, clicks):
        found = ((scores > 0) & (clicks > 0)).sum().item()
        self.recall += found / int(clicks.sum().item())
        self.loss += loss
        self.count += 1

    def reduce(self, device):
        sums = torch.tensor([self.loss, self.recall, self.count], device=device, dtype=torch.float64)
        dist.all_reduce(sums)
        return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def run_epoch(model, loader, optimizer, device):
    meter = Meter()
    for ids, clicks in loader:
        try:
            ids, clicks = ids.to(device), clicks.to(device)
            scores = model(ids)
            loss = F.binary_cross_entropy_with_logits(scores, clicks)
            loss.backward()
            meter.update(loss.item(), scores, clicks)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        except (ValueError, ArithmeticError):
            continue  # malformed rows
        finally:
            optimizer.zero_grad()
    return meter.reduce(device)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--events", type=int, default=2 * 120 * 64)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--out", default="clicks.pt")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")

    log = click_log(args.events, seed=4)
    share = len(log) // world
    loader = DataLoader(Subset(log, range(rank * share, (rank + 1) * share)), batch_size=args.batch_size, drop_last=True)

    torch.manual_seed(1)
    model = DistributedDataParallel(ClickModel().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        loss, recall = run_epoch(model, loader, optimizer, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, recall per batch {recall:.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
