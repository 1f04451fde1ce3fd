"""What the four scripts share: data, a model, and when to hang: FAULT=collate, rank 1 in its collate function."""

import os

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

STEPS = 12
FOR_EVER_SECONDS = 3600.0
_calls: dict[str, int] = {}


def hangs(where: str) -> bool:
    """At the fourth call, on rank 1, if that is what is asked for."""
    _calls[where] = _calls.get(where, 0) + 1
    return os.environ.get("FAULT") == where and os.environ.get("RANK") == "1" and _calls[where] == 4


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(256, 8, generator=generator), torch.randn(256, 1, generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)
