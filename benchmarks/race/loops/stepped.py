"""The same small loop four times, on tensors in memory: what is left of a step is the host's time.

torchrun --nproc-per-node=2 stepped.py {plain,ddp,tuned,session,session-tuned} WORK

`tuned` is DDP with buckets as gradients (gradient_as_bucket_view) and the optimizer's fused kernel. All contenders take
the same samples: those of rank r of W are every W-th of a global batch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import paceline
from race.gate import Gate
from race.works import WORKS, Work, mean_loss

SAMPLES = 8192


def tensors(work: Work) -> tuple[Tensor, Tensor]:
    data = work.make_dataset()
    first = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:SAMPLES]
    return data.gather(first)


def optimizer_of(work: Work, model: Any, *, fused: bool) -> torch.optim.Optimizer:
    kind = torch.optim.SGD if work.optimizer == "sgd" else torch.optim.AdamW
    return kind(model.parameters(), lr=work.lr, fused=fused or None)


def batches(work: Work, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    inputs, targets = tensors(work)
    step = work.batch * size
    while True:
        for start in range(0, len(inputs) // step * step, step):
            mine = torch.arange(start + rank, start + step, size)
            yield inputs.index_select(0, mine), targets.index_select(0, mine)


def by_hand(kind: str, work: Work, gate: Gate) -> None:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model: Any = gate.know(work.make_model())
    optimizer = optimizer_of(work, model, fused=kind == "tuned")
    if kind != "plain":
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=kind == "tuned")
    criterion = gate.hear(mean_loss)
    for x, y in batches(work, rank, size):
        gate.step()
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


def by_session(kind: str, work: Work, gate: Gate) -> None:
    s = paceline.session()
    model: Any = gate.know(work.make_model())
    model, optimizer = s.prepare(model, optimizer_of(work, model, fused=kind == "session-tuned"))
    step = work.batch * s.size
    loader = s.loader(DataLoader(TensorDataset(*tensors(work)), batch_size=step, drop_last=True))
    criterion = gate.hear(mean_loss)
    for _ in s.epochs(10**9):
        for x, y in loader:
            gate.step()
            optimizer.zero_grad()
            s.backward(criterion(model(x), y))
            optimizer.step()


def main() -> None:
    kind, work, gate = sys.argv[1], WORKS[sys.argv[2]], Gate()
    torch.set_num_threads(1)
    (by_session if kind.startswith("session") else by_hand)(kind, work, gate)


if __name__ == "__main__":
    main()
