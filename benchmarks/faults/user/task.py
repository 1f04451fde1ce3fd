"""The same training as a task of paceline, for the faults that strike inside of `paceline train`.

Copied into a folder with strikes.py and used there as `task.py:task`. The fault's step counts what this rank does:
the batches that it has loaded, the forward passes in training.
"""

import importlib
import os
import signal
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F
from strikes import BATCH, CLASSES, FEATURES, FOR_EVER_SECONDS, LATE_SECONDS, Plan, flip_a_bit, sample, two_sums
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline import Task

HIDDEN, SAMPLES = 1024, 4096
CHECKED = 18  # samples that the checks before the first step take
ITEM_SECONDS = 0.001


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of a vector and a class."""

    def __init__(self, plan: Plan, split: str) -> None:
        self.plan, self.length = plan, SAMPLES if split == "train" else 64
        self.loaded, self.bad = 0, -1  # items that this process has loaded, those of the checks too

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.loaded += 1
        self._strike(index)
        time.sleep(ITEM_SECONDS)
        values, label = sample(self.plan, index)
        if index == self.bad:
            values[0] = torch.nan
        return values, label

    def _strike(self, index: int) -> None:
        plan = self.plan
        if plan.hits("slow-first-batch") and self.loaded == CHECKED + 1:
            plan.strike()
            time.sleep(LATE_SECONDS)
        if plan.hits("straggler") and self.loaded > plan.step * BATCH and self.loaded % BATCH == 0:
            plan.strike()
            time.sleep(0.3)
        if plan.hits("nan", "loader-killed", "loader-hangs") and self.loaded == plan.step * BATCH:
            plan.strike()
            if plan.name == "loader-killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if plan.name == "loader-hangs":
                time.sleep(FOR_EVER_SECONDS)
            self.bad = index


class Network(nn.Module):
    """(B, FEATURES) -> (B, CLASSES)."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.passes = plan, 0
        self.layers = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        if self.training and x.shape[0] == BATCH:
            self.passes += 1
            if self.plan.hits("replica-flip") and self.passes == self.plan.step:
                self.plan.strike()
                flip_a_bit(self)
            if self.plan.hits("part-flip") and self.passes == self.plan.step:
                self.plan.strike()
                with torch._C.DisableTorchFunction():  # pyright: ignore  # else the whole weight would be seen
                    flip_a_bit(self)
            if self.plan.hits("slow-stage") and self.passes >= self.plan.step:
                self.plan.strike()
                time.sleep(0.3)
            if self.plan.hits("tensor-sleeps", "stage-sleeps", "stage-raises", "stage-killed"):
                self._strike()
        return self.layers(x)

    def _strike(self) -> None:
        if self.passes != self.plan.step:
            return
        self.plan.strike()
        if self.plan.name == "stage-killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.plan.name == "stage-raises":
            raise ValueError("a fault on purpose")
        time.sleep(FOR_EVER_SECONDS)  # FAULT: tensor-sleeps, stage-sleeps


class Loss:
    """Cross entropy, and two sums over all ranks that a user may have thought of."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.calls = plan, 0

    def each(self, logits: Tensor, classes: Tensor) -> Tensor:
        """(B, CLASSES), (B,) -> (B,)."""
        losses = F.cross_entropy(logits, classes, reduction="none")  # (B,)
        if self.plan.name == "swapped-collectives" and torch.is_grad_enabled() and len(losses) == BATCH:
            self.calls += 1
            two_sums(self.plan, self.plan.hits(self.plan.name) and self.calls == self.plan.step)
        return losses


def accuracy(plan: Plan, logits: Tensor, classes: Tensor) -> Tensor:
    """1 where the likeliest class is the right one, (B,)."""
    if plan.hits("long-evaluation"):
        plan.strike()
        time.sleep(LATE_SECONDS)
    return (logits.argmax(1) == classes).float()


def task() -> Task:
    """What `paceline train task.py:task` trains."""
    plan = Plan.from_env()
    if plan.hits("data-differs", "settings-differ", "code-differs"):
        plan.strike()
    versions = plan.folder / "versions"  # two folders with a module of one name
    if versions.is_dir():
        sys.path.insert(0, str(versions / ("new" if plan.hits("code-differs") else "old")))
        importlib.import_module("helper")
    return Task(
        make_model=lambda: Network(plan),
        make_dataset=lambda split: Samples(plan, split),
        loss=Loss(plan).each,
        metrics={"accuracy": partial(accuracy, plan)},
    )
