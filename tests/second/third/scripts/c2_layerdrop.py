"""A residual network with layers dropped at random, an average of its weights, and one decision for all ranks."""

import argparse
import copy
import csv
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

try:
    import wandb
except ImportError:
    wandb = None


class Noisy(Dataset):
    """Vectors with noise that is new each time."""

    def __init__(self, count, seed, noise):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(6, (count,), generator=g)
        looks = 0.25 * torch.randn(6, 96, generator=torch.Generator().manual_seed(5))
        self.clean = looks[self.labels] + torch.randn(count, 96, generator=g)
        self.noise = noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.clean[i] + self.noise * torch.randn(96), self.labels[i]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.inner(x)


class DropNet(nn.Module):
    def __init__(self, width=160, depth=4, drop=0.25):
        super().__init__()
        self.first = nn.Linear(96, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
        self.last = nn.Linear(width, 6)
        self.drop = drop

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            if self.training and torch.rand(()).item() < self.drop:
                continue
            h = block(h)
        return self.last(h)


class Run:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = DDP(DropNet(), find_unused_parameters=True)
        self.average = copy.deepcopy(self.model.module).eval().requires_grad_(False)
        torch.manual_seed(args.seed + 1 + self.rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)
        train_set, test_set = Noisy(9600, 1, args.noise), Noisy(999, 2, 0.0)
        self.sampler = DistributedSampler(train_set, seed=args.seed)
        self.loader = DataLoader(train_set, batch_size=args.batch_size, sampler=self.sampler)
        self.test = DataLoader(Subset(test_set, range(self.rank, len(test_set), self.world)), batch_size=50)
        self.folder = Path(tempfile.mkdtemp())

    def update(self, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        bad = torch.tensor(0.0 if torch.isfinite(norm) else 1.0)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item():
            return
        self.optimizer.step()
        with torch.no_grad():
            for old, new in zip(self.average.parameters(), self.model.module.parameters(), strict=True):
                old.lerp_(new, 1 - self.args.decay)

    @torch.no_grad()
    def score(self):
        sums = torch.zeros(3, dtype=torch.float64)
        for x, y in self.test:
            logits = self.average(x)
            sums[0] += nn.functional.cross_entropy(logits, y, reduction="sum")
            sums[1] += (logits.argmax(-1) == y).sum()
            sums[2] += len(y)
        dist.all_reduce(sums)
        return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()

    def save(self, epoch):
        torch.save(torch.get_rng_state(), self.folder / f"random-{self.rank}.pt")
        if self.rank == 0:
            state = {"model": self.average.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch}
            torch.save(state, self.folder / "last.tmp")
            (self.folder / "last.tmp").replace(self.folder / "last.pt")

    def fit(self):
        rows, best, waited = [], float("inf"), 0
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.update(x, y)
            loss, accuracy = self.score()
            self.scheduler.step(loss)
            self.save(epoch)
            rows.append([epoch, loss, accuracy])
            if self.rank == 0:
                print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
                if wandb is not None and wandb.run is not None:
                    wandb.log({"loss": loss, "accuracy": accuracy})
            waited = 0 if loss < best else waited + 1
            best = min(best, loss)
            if waited > 3:
                break
        if self.rank == 0:
            with (self.folder / "history.csv").open("w", newline="") as file:
                csv.writer(file).writerows(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--noise", type=float, default=0.5)
    parser.add_argument("--decay", type=float, default=0.99)
    parser.add_argument("--seed", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Run(options).fit()
    dist.destroy_process_group()
