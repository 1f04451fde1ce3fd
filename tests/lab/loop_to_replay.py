"""A session with dropout, batch norm, a scheduler and a wrong label, for tests of `paceline replay`."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

BAD = 37


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run")
    parser.add_argument("--strategy", default="exact")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--keep", type=int, default=9)
    parser.add_argument("--unseeded", action="store_true")
    parser.add_argument("--two-optimizers", action="store_true")
    options = parser.parse_args()

    x = torch.randn(110, 8, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    y[BAD] = 1 - y[BAD]
    settings = {"strategy": options.strategy, "virtual_ranks": options.ranks, "seed": None if options.unseeded else 3}
    with paceline.session(
        options.run, resume=True, checkpoint_every=options.every, keep_checkpoints=options.keep, **settings
    ) as s:
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
        model, optimizer, scheduler = s.prepare(
            net,
            torch.optim.AdamW(net[1:].parameters() if options.two_optimizers else net.parameters(), lr=0.05),
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
        )
        others = [s.prepare(model, torch.optim.AdamW(net[0].parameters()))[1]] if options.two_optimizers else []
        train = s.loader(TensorDataset(x, y), global_batch=32, last_batch="drop")
        for _ in s.epochs(4):
            for inputs, targets in train:
                net.zero_grad()
                s.backward(F.cross_entropy(model(inputs), targets))
                for each in (optimizer, *others):
                    each.step()
                scheduler.step()
            model.eval()
            s.log(accuracy=s.mean(sum((model(a).argmax(1) == b).sum() for a, b in train), len(x)))
            model.train()


if __name__ == "__main__":
    main()
