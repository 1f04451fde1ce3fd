"""A snapshot of tensors on a device: into page-locked memory, with one wait."""

import os
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.doubles.syncs import HostReads, on_the_cpu

from paceline.checkpoint.memory_snapshots import SnapshotWriter, newest_snapshot
from paceline.checkpoint.state import TensorShard


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """The modules that torch imports for the first dispatch mode stay loaded after a test."""
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
    """The page-locking functions of CUDA. `refuses`: they fail as in a container with too little memory."""

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


def state(device: str, size: int = 50) -> list[TensorShard]:
    return [TensorShard(f"model/{number}", torch.full((size,), float(number), device=device)) for number in range(20)]


class Copies(HostReads):
    """Records whether each copy off the device waits."""

    def __init__(self) -> None:
        super().__init__()
        self.wait: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = sum(self.lines.values())
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if func.name() == "aten::copy_" and args[1].is_meta:
            self.wait.append(sum(self.lines.values()) > before)
        return found


def test_the_last_copy_waits_for_all(files: tuple[int, int]) -> None:
    writer = SnapshotWriter(files, 0, 1, 0, spared=None)
    with Copies() as copies:
        writer.write([*state("meta"), TensorShard("z", torch.empty(0, device="meta"))], 3, {})
    assert copies.wait == [False] * 19 + [True]
    assert sum(copies.lines.values()) == 1


@pytest.mark.parametrize("refuses", [False, True])
def test_its_memory_is_page_locked_as_long_as_it_is_there(
    refuses: bool, files: tuple[int, int], monkeypatch: pytest.MonkeyPatch
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
    found = newest_snapshot([files])
    assert found is not None and found.meta.step == 5


def test_without_cuda_none_is_asked(files: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("asked"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with on_the_cpu():
        SnapshotWriter(files, 0, 1, 0, spared=None).write(state("cpu"), 3, {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    SnapshotWriter(files, 0, 1, 0, spared=None).write(state("cpu"), 4, {})  # a run on the CPU of a machine with GPUs
