"""Hooks on a script that nobody changed: each is called in its place, and what the script does stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.run_ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from paceline.worker.probes.hooks import Events, Hooks


class Heard(Events):
    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in vars(Events) and not name.startswith("_"):
            return lambda *told: self.events.append(f"{name} {told[0]}" if name == "raised" else name)
        return super().__getattribute__(name)


class Broken(Events):
    def step_begins(self, optimizer: Any) -> None:
        raise RuntimeError("a fault of ours")


def trained(model: Any, data: list[Any]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in data:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    return [float(p.detach().sum()) for p in model.parameters()]


def loop(rank: int, size: int, num_workers: int, hooked: bool) -> list[Any]:
    heard, complaints = Heard(), list[BaseException]()
    if hooked:
        Hooks(complaints.append).listen(heard).install()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), 2, num_workers=num_workers, persistent_workers=num_workers > 0)
    assert isinstance(loader, DataLoader)
    weights = [trained(model, loader) for _ in range(2)]  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3))
    dist.barrier()
    return [weights, heard.events, [repr(c) for c in complaints]]


STEP = [
    "batch_given",
    "forward_begins",
    "forward_ended",
    "backward_begins",
    "backward_ended",
    "step_begins",
    "step_ended",
]


@pytest.mark.ranks
@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_event_is_told_in_its_place_and_the_bits_stay(tmp_path: Path, num_workers: int) -> None:
    (plain, none, _), *_ = run_ranks(loop, 2, tmp_path, num_workers, False)
    (weights, events, complaints), *_ = run_ranks(loop, 2, tmp_path, num_workers, True)
    assert (weights, none, complaints) == (plain, [], [])
    drawn = [e for e in events if e == "indices_drawn"]
    assert len(drawn) == 4
    epoch = ["epoch_begins", *(["batch_asked", *STEP] * 2), "batch_asked", "epoch_ended"]
    assert [e for e in events if e != "indices_drawn"] == [
        "replica_made", *epoch, *epoch, "forward_begins", "raised forward",
    ]  # fmt: skip


def test_a_listener_that_fails_is_complained_of_and_the_script_goes_on(tmp_path: Path) -> None:
    assert run_ranks(complained, 1, tmp_path) == [[True, ["RuntimeError('a fault of ours')"] * 3]]


def complained(rank: int, size: int) -> list[Any]:
    complaints: list[BaseException] = []
    Hooks(complaints.append).listen(Broken()).install()
    first, *_, last = [trained(torch.nn.Linear(2, 1), [(torch.ones(1, 2),)]) for _ in range(3)]
    return [first != last, [repr(c) for c in complaints]]
