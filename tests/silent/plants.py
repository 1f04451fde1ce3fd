"""What the scripts of this folder share: `SCRIPT "FAULT; FAULT" [STEPS]`, and how rank 1 goes wrong without any error.

The first fault strikes in batch 12, each further one 16 batches later; those of settings from the start.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

FAULTS, STEPS = sys.argv[1].split("; "), int(sys.argv[2]) if len(sys.argv) > 2 else 60
SLOW_SECONDS = 0.05
_batches = 0


def has(name: str) -> bool:
    return name in FAULTS and os.environ["RANK"] == "1"


def here(name: str) -> bool:
    return has(name) and _batches == 12 + 16 * FAULTS.index(name)


def one_more_batch() -> int:
    """Its number, from 1; no step is so fast that nobody can look."""
    global _batches
    _batches += 1
    time.sleep(0.01)
    return _batches


class Samples(TensorDataset):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.randn(3000, 20), torch.randint(0, 4, (3000,)))
        if has("nan in the data"):
            self.tensors[0][2000:] = float("nan")

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if has("slow data"):
            time.sleep(SLOW_SECONDS / 10)
        return super().__getitem__(index)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    if has("another optimizer"):
        return torch.optim.SGD(model.parameters(), lr=0.01)
    lr, decay = 0.02 if has("another learning rate") else 0.01, 0.1 if has("another weight decay") else 0.0
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / 10))


def after_wrapping(model: nn.Module) -> None:
    """DDP has made the parameters equal."""
    if has("weights loaded on one rank only"):
        for one in model.parameters():
            nn.init.normal_(one, std=0.1)


def inputs(x: torch.Tensor) -> torch.Tensor:
    return x * float("nan") if here("nan in one batch") else x


def lost(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    if here("a gradient that is nan"):
        first = next(model.parameters())
        return loss + (first - first).abs().sqrt().sum()
    return loss * float("inf") if here("an infinite loss") else loss


def after_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gradients are those of all ranks now."""
    first, _, third, *_ = model.parameters()
    if here("a gradient changed after it was summed"):
        third.grad.mul_(2)
    if here("a gradient set to nan after it was summed"):
        first.grad[0] = float("nan")
    if here("clipped on one rank"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    if here("gradients zeroed on one rank"):
        optimizer.zero_grad()
    if has("slow step"):
        time.sleep(SLOW_SECONDS)


@torch.no_grad()
def after_step(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: object) -> None:
    """Parameters have been updated, and gradients are still there."""
    _, _, third, *_, last = model.parameters()
    if here("steps twice"):
        optimizer.step()
    if here("weights changed in place"):
        last.add_(1e-3)
    if here("a bit flips"):
        third.data.view(torch.int32)[3, 5] ^= 1 << 3
    if here("optimizer state lost"):
        optimizer.state.clear()
    if here("weights averaged on one rank"):
        for one in model.parameters():
            one.mul_(0.999)
    if here("weights loaded again"):
        model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
    if has("schedule stepped on one rank"):
        schedule.step()


def at_the_end(optimizer: torch.optim.Optimizer) -> None:
    if has("one step more at the end"):
        optimizer.step()
