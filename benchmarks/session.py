"""What a session costs: the same training by `paceline.session` and by `train_step`, in turn, in the same ranks.

    python benchmarks/session.py --out benchmarks/results/session.json

Ratios of seconds, session / train_step, one for each pair of blocks; 1.00 is nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import STRATEGIES, BatchPlan, Loading, load_steps, ranks_share, train_step
from paceline.models import CNN
from paceline.train.order import CallOrder
from paceline.train.votes import Votes
from paceline.worker.guard import Guard

BLOCK, PAIRS = 60, 8
WORKS = {"cnn": (CNN, (1, 28, 28), 64), "mlp": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), (784,), 64)}


def measure(work: str) -> list[float]:
    """Ratios, on this rank."""
    make, shape, batch = WORKS[work]
    ratios: list[float] = []
    with paceline.session() as s:
        torch.manual_seed(0)
        data = TensorDataset(
            torch.randn(BLOCK * batch * s.size, *shape), torch.randint(0, 10, (BLOCK * batch * s.size,))
        )
        model, optimizer = s.prepare(make(), partial(torch.optim.AdamW, fused=True))
        train = s.loader(data, global_batch=batch * s.size)
        replica = STRATEGIES["bucketed"](make(), partial(torch.optim.AdamW, fused=True), s.world)
        plan = BatchPlan(len(data), batch * s.size, s.size)
        mine = ranks_share(s.size, s.rank, s.size)
        loss = partial(F.cross_entropy, reduction="none")
        guard = Guard.of_process()
        order = CallOrder(s.world, guard.take_order, guard.taken, print)

        def by_session() -> None:
            for x, y in train:
                optimizer.zero_grad()
                s.backward(F.cross_entropy(model(x), y))
                optimizer.step()

        def by_step() -> None:
            replica.model.train()
            for bodies in load_steps(data, plan, mine, Loading(s.device), start=0, stop=plan.steps_per_epoch):
                train_step(replica, bodies, loss, votes=Votes, enter=guard.box.enter, order=order)

        for number in range(PAIRS + 1):
            seconds: list[float] = []
            for act in (by_step, by_session) if number % 2 else (by_session, by_step):
                s.sum(0.0)  # together
                began = time.perf_counter()
                act()
                seconds.append(time.perf_counter() - began)
            first, second = seconds
            if number:  # the first is a warm-up
                ratios.append(second / first if number % 2 else first / second)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    found: dict[str, Any] = {}
    for nproc in told.nproc:
        for work in WORKS:
            ratios = paceline.run(measure, nproc, (work,))[0]
            low, _, high = quantiles(ratios, n=4)
            found[f"{work}, {nproc} ranks"] = {"ratios": ratios, "median": median(ratios)}
            print(f"{work}, {nproc} ranks: {median(ratios):.3f} ({low:.3f} to {high:.3f})")
    if told.out:
        told.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
