"""What the reduction of gradients costs beyond a backward: kernels, messages and Python calls, of several designs.

The record in docs/design.md is of these numbers. Operations on the CPU are those of a GPU: each launches a kernel.
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
import torch.distributed as dist
from tests.doubles import syncs
from tests.doubles.test_kernels import Kernels
from tests.doubles.test_syncs import begin
from tests.run_ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.collectives.reducer import make_rank_reducer
from paceline.collectives.tree import LeafPartition
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

        syncs.DoesNothing.allreduce = syncs.DoesNothing.allreduce_coalesced = counting


Backward = Callable[[nn.Module, list[nn.Parameter]], Callable[[Tensor], None]]
"""Prepares a model; the returned function computes its gradients from a batch"""


def alone(model: nn.Module, parameters: list[nn.Parameter]) -> Callable[[Tensor], None]:
    def step(batch: Tensor) -> None:
        for parameter in parameters:
            parameter.grad = None
        model(batch).sum().backward()

    return step


def bucketed(model: nn.Module, parameters: list[nn.Parameter]) -> Callable[[Tensor], None]:
    reducer, backward = make_rank_reducer(model, LeafPartition.one_leaf_per_rank(2, 0)), alone(model, parameters)

    def step(batch: Tensor) -> None:
        reducer.begin_backward(0, is_last=True)
        backward(batch)
        reducer.end_backward()
        with torch.no_grad():
            reducer.finish(1.0)

    return step


def ddp(model: nn.Module, parameters: list[nn.Parameter]) -> Callable[[Tensor], None]:
    return alone(DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True), parameters)


def ddp_with_gradients_kept(model: nn.Module, parameters: list[nn.Parameter]) -> Callable[[Tensor], None]:
    module = DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True)

    def step(batch: Tensor) -> None:
        torch._foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None] or [batch])
        module(batch).sum().backward()

    return step


def flat_views(model: nn.Module, parameters: list[nn.Parameter]) -> Callable[[Tensor], None]:
    """autograd adds to views of one tensor."""
    flat = torch.zeros(sum(map(Tensor.numel, parameters)))
    parts = flat.split([*map(Tensor.numel, parameters)])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.as_strided(parameter.shape, parameter.stride())

    def step(batch: Tensor) -> None:
        flat.zero_()
        model(batch).sum().backward()
        dist.all_reduce(flat)

    return step


def coalesced(model: nn.Module, parameters: list[nn.Parameter]) -> Callable[[Tensor], None]:
    """Each gradient is a message, in one call; one more message says which parameters this rank has used."""
    backward, used = alone(model, parameters), torch.ones(len(parameters))

    def step(batch: Tensor) -> None:
        backward(batch)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        group: Any = dist.group.WORLD
        group.allreduce_coalesced([*gradients, used.clone()], dist.AllreduceCoalescedOptions())

    return step


def counted(rank: int, size: int, names: list[str]) -> dict[str, Cost]:
    begin()
    found, messages = dict[str, Cost](), _Messages()
    for name in names:
        with torch.device("cpu"):
            model = ResNet18(channels=1, num_classes=10).to(memory_format=torch.channels_last)
        step = globals()[name](model, [*model.parameters()])
        batch = torch.zeros(2, 1, 28, 28).contiguous(memory_format=torch.channels_last)
        for _ in range(3):  # in the second, DDP makes its buckets anew
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
        found[name] = Cost(kernels.count, sent, calls)
    plain = found["alone"]
    return {name: Cost(c.kernels - plain.kernels, c.messages, c.calls - plain.calls) for name, c in found.items()}


@pytest.mark.ranks
def test_a_bucket_takes_one_kernel_and_one_message(tmp_path: Path) -> None:
    others = ["ddp", "ddp_with_gradients_kept", "flat_views", "coalesced"]
    (found,) = run_ranks(counted, 1, tmp_path, ["alone", "bucketed", *others])
    own = found["bucketed"]
    tensors = len([*ResNet18(channels=1, num_classes=10).parameters()])
    assert (own.kernels, own.messages) == (BUCKETS, BUCKETS)
    assert own.calls <= tensors + 48 * BUCKETS  # a hook for each gradient; the rest for each bucket
    assert all(found[name].kernels >= tensors for name in others[:-1]), found  # a copy or an addition for each
    assert found["coalesced"].messages == tensors + 1
