"""Broadcasts copy all bytes for any type and strides, and report a model that differs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.run_ranks import run_ranks
from torch import Tensor, nn

from paceline.collectives.communicator import make_communicator
from paceline.collectives.replicate import broadcast_module, check_same_model
from paceline.protocol.control import SHARED_MEMORY


class Odd(nn.Module):
    """A tensor of each unusual kind, filled with numbers of this rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(100 + rank)
        self.transposed = nn.Parameter(torch.randn(4, 3).t())
        self.channels_last = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.bfloat = nn.Parameter(torch.randn(5, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("some_flags", torch.rand(7) > 0.5)
        self.register_buffer("count", torch.tensor(40 + rank))
        self.register_buffer("some_short", torch.randint(0, 999, (3,), dtype=torch.int16))
        self.register_buffer("some_complex", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.fill_(rank)  # type: ignore[union-attr]
        self.tied = self.norm


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def changed(name: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    if name == "shape":
        module[0] = nn.Linear(4, 3)
    elif name == "dtype":
        module[1].running_var = module[1].running_var.double()  # type: ignore[union-attr]
    elif name == "name":
        module = nn.Sequential(nn.Linear(2, 3))
        module.add_module("norm", nn.BatchNorm1d(3))
    elif name == "missing":
        module = nn.Sequential(nn.Linear(2, 3))
    elif name == "frozen":
        module[0].bias.requires_grad_(False)  # type: ignore[union-attr]
    return module


def checks(rank: int, world_size: int) -> dict[str, str]:
    assert (make_communicator().memory is None) == (os.environ[SHARED_MEMORY] == "off")
    for src in (0, 2):
        module, wanted = Odd(rank), tensors(Odd(src))
        before = {name: (t.stride(), t.data_ptr()) for name, t in tensors(module).items()}
        broadcast_module(module, src=src)
        for name, tensor in tensors(module).items():
            assert torch.equal(tensor, wanted[name]), (src, name)
            assert (tensor.stride(), tensor.data_ptr()) == before[name], name  # in place
        assert module.transposed.requires_grad
    broadcast_module(nn.Linear(2, 2))  # no buffers
    broadcast_module(nn.ReLU())  # nothing at all
    errors: dict[str, str] = {}
    for name in ("shape", "dtype", "name", "missing", "frozen"):
        module = changed(name if rank == 1 else "")
        before = {n: t.clone() for n, t in tensors(module).items()}
        with pytest.raises(ValueError, match="models differ") as caught:
            broadcast_module(module)
        errors[name] = str(caught.value)
        assert all(torch.equal(t, before[n]) for n, t in tensors(module).items())
    return errors


@pytest.mark.ranks
@pytest.mark.parametrize("memory", ["auto", "off"])
def test_broadcast_and_comparison(memory: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SHARED_MEMORY, memory)
    errors, *others = run_ranks(checks, 3, tmp_path)
    assert all(other == errors for other in others)
    for name, odd, usual in [
        ("shape", "parameter 0.weight (3, 4) float32", "parameter 0.weight (3, 2) float32"),
        ("dtype", "buffer 1.running_var (3,) float64", "buffer 1.running_var (3,) float32"),
        ("name", "parameter norm.weight (3,) float32", "parameter 1.weight (3,) float32"),
        ("missing", "nothing", "parameter 1.weight (3,) float32"),
        ("frozen", "parameter 0.bias (3,) float32, frozen", "parameter 0.bias (3,) float32"),
    ]:
        assert f"rank 1: {odd}, but ranks 0, 2: {usual}." in errors[name]


@pytest.mark.parametrize(
    ("of_rank", "told"),
    [
        ([["a", "b"], ["a", "c"]], "entry 1: rank 0: b, but rank 1: c."),  # of two, neither is the odd one
        ([["a"], ["a", "b"]], "entry 1: rank 0: nothing, but rank 1: b."),
        ([["x"], ["x"], ["y"], ["x"], ["z"]], "entry 0: rank 2: y, but rank 4: z, but ranks 0, 1, 3: x."),
        ([["x"]] * 30 + [["y"]], "entry 0: rank 30: y, but ranks 0, 1, 2, 3, 4, 5, 6, 7 and 22 more: x."),
    ],
)
def test_the_odd_rank_comes_first(of_rank: list[list[str]], told: str) -> None:
    with pytest.raises(ValueError, match="models differ") as caught:
        check_same_model(of_rank)
    assert told in str(caught.value)


@pytest.mark.parametrize("of_rank", [[[]], [["a"]], [["a", "b"]] * 3])
def test_equal_models_pass(of_rank: list[list[str]]) -> None:
    check: Callable[[list[list[str]]], None] = check_same_model
    check(of_rank)
