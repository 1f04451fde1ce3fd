"""The size of insurance claims: each process has the claims of a region."""

import argparse
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

log = logging.getLogger("claims")

FEATURES = 48


def region(number, count):
    rule = torch.randn(FEATURES, generator=torch.Generator().manual_seed(2)) / FEATURES**0.5
    g = torch.Generator().manual_seed(100 + number)
    x = torch.randn(count, FEATURES, generator=g)
    y = x @ rule + 0.2 * (x[:, 0] * x[:, 1]) + 0.1 * torch.randn(count, generator=g)
    if number == 2:
        y[1234] = 4.0e3
    return TensorDataset(x, y)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        net = nn.Sequential(
            nn.Linear(FEATURES, 256), nn.SiLU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 1)
        )
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.01)
        self.loader = DataLoader(
            region(self.rank, args.claims),
            batch_size=args.batch_size,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator().manual_seed(args.seed + self.rank),
        )
        total = args.epochs * len(self.loader)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=args.lr, total_steps=total)
        self.skipped = 0

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x).squeeze(-1), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        if loss.item() > self.args.skip_above:
            self.skipped += 1
            return loss.item()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def fit(self):
        for epoch in range(self.args.epochs):
            losses = [self.step(x, y) for x, y in self.loader]
            losses.sort()
            log.info("epoch %d median loss %.4f skipped %d", epoch, losses[len(losses) // 2], self.skipped)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--claims", type=int, default=6400)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--skip-above", type=float, default=1e3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    Trainer(args).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
