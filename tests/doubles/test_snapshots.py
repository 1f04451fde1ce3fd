"""A snapshot of what is on a device: into page-locked memory, with one wait."""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass, field

import pytest
import torch
from tests.doubles.syncs import HostReads, on_the_cpu

from paceline.checkpoint.snapshot import SnapshotWriter, newest
from paceline.checkpoint.state import Held


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """What torch imports for the first dispatch mode outlives a test."""
    with HostReads():
        torch.zeros(1)


@pytest.fixture
def files() -> Generator[tuple[int, int]]:
    pair = (os.memfd_create("first"), os.memfd_create("second"))
    yield pair
    for descriptor in pair:
        os.close(descriptor)


@dataclass
class Cudart:
    """Of CUDA's library, what page-locks; `refuses` as a container with too little memory for it does."""

    refuses: bool = False
    locked: dict[int, int] = field(default_factory=dict[int, int])
    calls: int = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.calls += 1
        if not self.refuses:
            self.locked[address] = size
        return int(self.refuses)

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    found: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", found.append)
    return found


def state(device: str, size: int = 50) -> list[Held]:
    return [Held(f"model/{number}", torch.full((size,), float(number), device=device)) for number in range(20)]


def test_it_waits_once_for_all_tensors(files: tuple[int, int], waits: list[torch.device]) -> None:
    writer = SnapshotWriter(files, 0, 1, 0, spared=None)
    with HostReads() as reads:
        writer.write(state("meta"), 3, {})
    assert not reads.lines
    assert waits == [torch.device("meta")]


def test_on_the_cpu_nothing_waits(files: tuple[int, int], waits: list[torch.device]) -> None:
    SnapshotWriter(files, 0, 1, 0, spared=None).write(state("cpu"), 3, {})
    assert not waits


def test_no_half_copied_state_is_taken(files: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    writer, seen = SnapshotWriter(files, 0, 1, 0, spared=None), list[bool]()
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: seen.append(newest([files]) is None))
    with on_the_cpu():
        writer.write(state("cpu"), 3, {})
    assert seen == [True]  # it counts as a state only once the copies are over
    found = newest([files])
    assert found is not None and found.step == 3
    assert torch.equal(found.source.tensor("model/7"), torch.full((50,), 7.0))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("refuses", [False, True])
def test_its_memory_is_page_locked_as_long_as_it_is_there(
    refuses: bool, files: tuple[int, int], waits: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart, kernels = Cudart(refuses), list[str]()

    def kernel(size: int, device: str) -> None:
        kernels.append(device)
        raise RuntimeError("CUDA error: out of memory")  # what the refusal has left behind

    monkeypatch.setattr(torch, "zeros", kernel)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    writer = SnapshotWriter(files, 0, 1, 0, spared=None)
    with on_the_cpu():
        for step in range(4):
            writer.write(state("cpu"), step, {})
        assert cudart.calls == 2  # one for each file, not for each snapshot
        before = {*cudart.locked}
        for step in range(4, 6):
            writer.write(state("cpu", size=5000), step, {})
    assert len(cudart.locked) == (0 if refuses else 2)
    assert cudart.calls == 4
    assert refuses or all(cudart.locked[writer._buffers[one].data_ptr()] == len(writer._buffers[one]) for one in files)
    assert len(before) == len(cudart.locked)
    assert kernels == ["cuda"] * (4 if refuses else 0)  # no later kernel is blamed for it
    found = newest([files])
    assert found is not None and found.step == 5


def test_without_cuda_none_is_asked(
    files: tuple[int, int], waits: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("asked"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with on_the_cpu():
        SnapshotWriter(files, 0, 1, 0, spared=None).write(state("cpu"), 3, {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    SnapshotWriter(files, 0, 1, 0, spared=None).write(state("cpu"), 4, {})  # a run on the CPU of a machine with GPUs
