"""A task for tests of `paceline diff`. A test copies this file and changes one line."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline import Task


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(110, 16, generator=torch.Generator().manual_seed(1))
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.01 * torch.randn(16), self.y[index]


class Scale(torch.autograd.Function):
    """Returns its input."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * 1.0


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return Scale.apply(self.norm(F.relu(self.linear(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.drop, self.head = nn.Linear(16, 32), Middle(), nn.Dropout(0.1), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.middle(self.first(x).tanh())))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def factor(step: int) -> float:
    return 1.0


def make_schedule(optimizer: torch.optim.Optimizer, total: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def task() -> Task:
    return Task(Net, lambda split: Noisy(), loss, make_optimizer=make_optimizer, make_schedule=make_schedule)
