"""What a session costs: the same training by `paceline.session` and by a task's steps, in turn, in the same ranks.

    python benchmarks/session.py --out benchmarks/results/session.json

Step by step in turn, so that other programs disturb both alike. Ratios, session / task, of the lower quartiles of a
block's steps, one for each block; 1.00 is nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import STRATEGIES, BatchPlan, LoadingOptions, Schedule, fit, load_steps, virtual_ranks_of
from paceline.rank.guard import HangGuard
from paceline.stepping.order import CollectiveOrderCheck
from paceline.stepping.totals import ControlFlags
from paceline.tasks.mnist import CNN

BLOCK, BLOCKS = 60, 16
WORKS = {"cnn": (CNN, (1, 28, 28), 64), "mlp": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), (784,), 64)}


def measure(work: str) -> dict[str, list[float]]:
    """Ratios of seconds and of this rank's processor time."""
    make, shape, batch = WORKS[work]
    ratios: dict[str, list[float]] = {"ratios": [], "processor": []}
    with paceline.session(threads=1) as s:
        torch.manual_seed(0)
        size = BLOCK * batch * s.size
        data = TensorDataset(torch.randn(size, *shape), torch.randint(0, 10, (size,)))
        model, optimizer = s.prepare(make(), partial(torch.optim.AdamW, fused=True))
        train = s.loader(data, global_batch=batch * s.size)
        replica = STRATEGIES["bucketed"](make(), partial(torch.optim.AdamW, fused=True), s.world)
        plan = BatchPlan(len(data), batch * s.size, s.size)
        mine = virtual_ranks_of(s.size, s.rank, s.size)
        guard = HangGuard.of_process()
        order = CollectiveOrderCheck(s.world, guard.ledger.take_order_hash, guard.ledger.last_ordered_calls, print)

        def by_session() -> Generator[None]:
            for x, y in train:
                optimizer.zero_grad()
                s.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                yield

        def by_task() -> Generator[None]:
            loss = partial(F.cross_entropy, reduction="none")
            batches = load_steps(data, plan, mine, LoadingOptions(s.device), start=0, stop=plan.steps_per_epoch)
            schedule = Schedule(1e-3, plan.steps_per_epoch)
            yield from fit(replica, batches, loss, schedule, votes=ControlFlags, page=guard.page, order=order)

        for number in range(BLOCKS + 1):
            loops = [by_session(), by_task()]
            spent: list[list[tuple[float, float]]] = [[], []]
            for step in range(BLOCK):
                for which in (0, 1) if step % 2 else (1, 0):
                    began, cpu = time.perf_counter(), time.thread_time()
                    next(loops[which])
                    spent[which].append((time.perf_counter() - began, time.thread_time() - cpu))
            for loop in loops:
                assert next(loop, None) is None
            for kind, name in enumerate(ratios):
                session, task = (quantiles([one[kind] for one in steps], n=4)[0] for steps in spent)
                if number:  # the first is a warm-up
                    ratios[name].append(session / task)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    found: dict[str, Any] = {}
    for nproc in told.nproc:
        for work in WORKS:
            name, ratios = f"{work}, {nproc} ranks", paceline.run(measure, nproc, (work,))[0]
            found[name] = ratios | {"median": median(ratios["ratios"])}
            for kind, words in (("ratios", "seconds"), ("processor", "processor time")):
                low, middle, high = quantiles(ratios[kind], n=4)
                print(f"{name}, {words}: {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
    if told.out:
        told.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
