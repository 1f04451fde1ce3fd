"""Buffers can be put back as they were before a step, whatever has been done to them."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.run_ranks import run_ranks
from torch import Tensor, nn

from paceline.data.plan import MicroBatchPlan
from paceline.rank.world import World
from paceline.strategies import buffers as module
from paceline.strategies.buffers import VirtualBuffers

WORLD = World(0, 1, 0, 1, torch.device("cpu"), "gloo")


class Odd(nn.Module):
    """Batch norm, a buffer that is replaced in each forward, and a table that nobody writes into."""

    last: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.mean(0)
        return self.norm(x)


def work(virtual_rank: int) -> MicroBatchPlan:
    return MicroBatchPlan(0, 0, virtual_rank, 0, torch.arange(4))


def forward(buffers: VirtualBuffers, model: nn.Module, virtual_rank: int, seed: int) -> None:
    with buffers.micro_batch_context(work(virtual_rank)):
        model(torch.randn(4, 2, generator=torch.Generator().manual_seed(seed)))


def values(buffers: VirtualBuffers) -> dict[str, list[float]]:
    return {held.name: held.tensor.flatten().tolist() for held in buffers.hold()}


def test_put_back_is_what_was_kept_and_what_follows_is_as_if_nothing_had_been():
    model, never = Odd(), Odd()
    buffers, others = VirtualBuffers(model, WORLD, 2), VirtualBuffers(never, WORLD, 2)
    for one, of in ((buffers, model), (others, never)):
        forward(one, of, 0, seed=0)
    buffers.save_copies()
    before = values(buffers)
    forward(buffers, model, 0, seed=1)
    forward(buffers, model, 1, seed=2)  # had none before
    assert values(buffers).keys() > before.keys()
    buffers.put_back()
    assert values(buffers) == before
    for one, of in ((buffers, model), (others, never)):
        forward(one, of, 0, seed=3)
        forward(one, of, 1, seed=4)
    assert values(buffers) == values(others)


def test_what_was_put_back_can_be_kept_again():
    model = Odd()
    buffers = VirtualBuffers(model, WORLD, 1)
    for seed in range(3):
        forward(buffers, model, 0, seed)
        buffers.save_copies()
        before = values(buffers)
        for _ in range(2):
            forward(buffers, model, 0, seed=9)
            buffers.put_back()
            assert values(buffers) == before


def test_put_back_writes_into_the_buffers_own_memory_but_not_into_what_has_replaced_it():
    model = Odd()
    buffers = VirtualBuffers(model, WORLD, 1)
    forward(buffers, model, 0, seed=0)
    buffers.save_copies()
    mean, last = model.norm.running_mean, model.last
    forward(buffers, model, 0, seed=1)
    replaced = model.last
    wanted = replaced.clone()
    assert model.norm.running_mean is mean and replaced is not last
    buffers.put_back()
    assert model.norm.running_mean is mean
    assert torch.equal(replaced, wanted) and model.last is not replaced


@pytest.mark.parametrize(
    "change", [lambda t: t.add_(1), lambda t: t.set_(torch.ones(6))], ids=["in place", "other memory"]
)
def test_large_tables_are_copied_only_when_they_change(monkeypatch, change):
    monkeypatch.setattr(module, "ALWAYS_COPIED_BYTES", 8)
    copied: list[int] = []
    copy = torch._foreach_copy_  # pyright: ignore

    def counted(copies: list[Tensor], originals: list[Tensor]) -> None:
        copied.append(sum(t.numel() == 6 for t in originals))
        copy(copies, originals)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    model = Odd()
    buffers = VirtualBuffers(model, WORLD, 1)
    forward(buffers, model, 0, seed=0)
    for _ in range(4):
        buffers.save_copies()
        forward(buffers, model, 0, seed=1)
    assert sum(copied) <= 1
    change(model.table)
    buffers.save_copies()
    changed = values(buffers)
    model.table.zero_()
    buffers.put_back()
    assert values(buffers) == changed


class Counters(nn.Module):
    """Buffers that are no floats, with a value of their own on each rank."""

    buffer_reductions: ClassVar = {f"counter_{number}": "first" for number in range(12)}

    def __init__(self, rank: int) -> None:
        super().__init__()
        for number in range(12):
            self.register_buffer(f"counter_{number}", torch.tensor(100 * rank + number))


def merged(rank: int, size: int) -> list[int]:
    model = Counters(rank)
    buffers = VirtualBuffers(model, World(rank, size, rank, size, torch.device("cpu"), "gloo"), size)
    with buffers.micro_batch_context(work(rank)):
        pass
    with buffers.merged():
        return [int(buffer) for buffer in model.buffers()]


@pytest.mark.ranks
@pytest.mark.parametrize("memory", ["auto", "off"])
def test_each_buffer_declared_first_is_that_of_the_first_virtual_rank(memory, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PACELINE_SHARED_MEMORY", memory)
    assert run_ranks(merged, 2, tmp_path) == [[*range(12)]] * 2
