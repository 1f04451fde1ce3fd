"""What the reduction of gradients costs beyond a backward: kernels, messages and Python calls.

Operations on the CPU are those of a GPU: each launches a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.doubles import syncs
from tests.doubles.test_kernels import Kernels
from tests.doubles.test_syncs import begin
from tests.run_ranks import run_ranks
from torch import Tensor, nn

from paceline.collectives.reducer import make_reducer
from paceline.collectives.sum_tree import LeafPartition
from paceline.tasks.mnist import ResNet18

BUCKETS = 3


@dataclass
class Cost:
    kernels: int
    messages: int
    """gradients, or buckets of them, that are summed over ranks separately"""
    calls: int


class _Messages:
    """Counts the tensors of all-reduces."""

    count = 0

    def __init__(self) -> None:
        all_reduce = syncs.DoesNothing.allreduce

        def counting(group: Any, tensors: Any, *more: Any) -> Any:
            self.count += len(tensors) if isinstance(tensors, list) else 1
            return all_reduce(group, tensors, *more)

        syncs.DoesNothing.allreduce = counting


Backward = Callable[[nn.Module, list[nn.Parameter]], Callable[[Tensor], None]]
"""Prepares a model; the returned function computes its gradients from a batch"""


def alone(model: nn.Module, parameters: list[nn.Parameter]) -> Callable[[Tensor], None]:
    def step(batch: Tensor) -> None:
        for parameter in parameters:
            parameter.grad = None
        model(batch).sum().backward()

    return step


def bucketed(model: nn.Module, parameters: list[nn.Parameter]) -> Callable[[Tensor], None]:
    reducer = make_reducer(model, LeafPartition.one_leaf_per_rank(2, 0), in_order=False)
    backward = alone(model, parameters)

    def step(batch: Tensor) -> None:
        reducer.begin_backward(0, is_last=True)
        backward(batch)
        reducer.end_backward()
        with torch.no_grad():
            reducer.finish(1.0)

    return step


def counted(rank: int, size: int) -> Cost:
    begin()
    found, messages = list[Cost](), _Messages()
    for make in (alone, bucketed):
        with torch.device("cpu"):
            model = ResNet18(channels=1, num_classes=10).to(memory_format=torch.channels_last)
        step = make(model, [*model.parameters()])
        batch = torch.zeros(2, 1, 28, 28).contiguous(memory_format=torch.channels_last)
        for _ in range(2):
            step(batch)
        calls = messages.count = 0
        with Kernels() as kernels:
            step(batch)
        sent = messages.count

        def note(frame: FrameType, event: str, _: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(note)
        step(batch)
        sys.setprofile(None)
        found.append(Cost(kernels.count, sent, calls))
    plain, own = found
    return Cost(own.kernels - plain.kernels, own.messages, own.calls - plain.calls)


@pytest.mark.ranks
def test_a_bucket_takes_one_kernel_and_one_message(tmp_path: Path) -> None:
    (own,) = run_ranks(counted, 1, tmp_path)
    tensors = len([*ResNet18(channels=1, num_classes=10).parameters()])
    assert (own.kernels, own.messages) == (BUCKETS, BUCKETS)
    assert own.calls <= tensors + 48 * BUCKETS  # a hook for each gradient; the rest for each bucket
