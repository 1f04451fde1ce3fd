"""The works as `paceline train` takes them: race.tasks:W1, race.tasks:W2, ...

Everything is as `paceline train` does it by default. The test data are a few samples, for no peer evaluates here.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import Tensor

from paceline import ArrayDataset, Task
from paceline.rank.guard import HangGuard
from race.gate import Gate
from race.works import WORKS, Work, losses

TEST_SAMPLES = 64
PROBED = 2  # samples at most that are looked at before the first step


def _task(work: Work) -> Task:
    # A rank that stands at the gate is no hang: it says once a second that it lives.
    gate = Gate(tick=HangGuard.of_process().page.tick)
    at_data = os.environ.get("RACE_GATE") == "data"

    def make_dataset(split: str) -> ArrayDataset:
        train = work.make_dataset()
        if split == "train":
            return _held(gate, train) if at_data else train
        return ArrayDataset(*train.gather(torch.arange(TEST_SAMPLES)))

    def make_model() -> torch.nn.Module:
        return (gate.know if at_data else gate.hold)(work.make_model())

    return Task(make_model, make_dataset, gate.hear(losses))


def _held(gate: Gate, data: ArrayDataset) -> ArrayDataset:
    """`data`, whose batches stand at the gate."""
    transform = data.transform

    def stand(inputs: Tensor) -> Tensor:
        if len(inputs) > PROBED:
            gate.step()
        return inputs if transform is None else transform(inputs)

    return ArrayDataset(data.inputs, data.targets, stand)


W1, W2, W3, W3g, tiny = (partial(_task, WORKS[name]) for name in ("W1", "W2", "W3", "W3g", "tiny"))
