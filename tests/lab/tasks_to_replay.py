"""A task with a planted fault: a sample that is not a number, a wrong label, or a layer that divides by zero."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline import Task

BAD = 37


class Divides(nn.Module):
    """Divides by zero if an input is large."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x.amax()) if self.training and float(x.amax()) > 2.4 else x


def planted(fault: str = "") -> Task:
    def make_dataset(split: str) -> TensorDataset:
        x = torch.randn(110, 8, generator=torch.Generator().manual_seed(1))
        y = (x.sum(1) > 0).long()
        if split == "train" and fault == "sample":
            x[BAD] = torch.nan
        if split == "train" and fault == "label":
            y[BAD] = 1 - y[BAD]
        return TensorDataset(x, y)

    def make_model() -> nn.Module:
        layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)]
        return nn.Sequential(*layers[:3], Divides(), *layers[3:]) if fault == "layer" else nn.Sequential(*layers)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    return Task(make_model, make_dataset, loss)
