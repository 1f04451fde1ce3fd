"""Small tasks, each with one thing that goes wrong easily in data-parallel training."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import ArrayDataset, Task


def _images(split: str) -> ArrayDataset:
    generator = torch.Generator().manual_seed(len(split))
    return ArrayDataset(torch.randn(160, 1, 8, 8, generator=generator), torch.randint(10, (160,), generator=generator))


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Dropout(0.4), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 10),
    )  # fmt: skip


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10),
    )  # fmt: skip


class _Unused(nn.Module):
    """Has a layer that no forward uses: its gradient is None on every rank, and weight decay must not move it."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Linear(5, 5), _mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class _Sequences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sequences of different lengths, padded; loaded one by one."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(7, generator=torch.Generator().manual_seed(index))
        real = torch.arange(6) < 1 + index % 6
        return values[:-1], torch.where(real, values[1:], torch.nan)


def _token_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    real = ~targets.isnan()  # (B, T)
    return (outputs - targets.nan_to_num()).square(), real.to(outputs.dtype)


dropout = Task(_mlp, _images, _cross_entropy)
batchnorm = Task(_convolutions, _images, _cross_entropy)
unused = Task(_Unused, _images, _cross_entropy)
tokens = Task(lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6)), lambda _: _Sequences(), _token_loss)


class _Strided(nn.Module):
    """Parameters that are not contiguous: what walks through memory instead of by strides meets other elements."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.convolution_2 = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
        self.weight = nn.Parameter(torch.randn(10, 64).t() / 8)  # (64, 10), column after column

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution_2(self.convolution(x).tanh()).flatten(1) @ self.weight


strided = Task(_Strided, _images, _cross_entropy)


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    """Weights decay and learn faster, biases do not."""
    weights, biases = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    return torch.optim.RMSprop([{"params": weights, "weight_decay": 0.3, "lr": 0.03}, {"params": biases}], lr=0.003)


def _falling(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)


own = Task(_mlp, _images, _cross_entropy, make_optimizer=_groups, make_schedule=_falling)
scheduled = Task(_mlp, _images, _cross_entropy, make_schedule=_falling)
whole = Task(_mlp, _images, _cross_entropy, make_optimizer=lambda model: torch.optim.Adafactor(model.parameters()))
lbfgs = Task(_mlp, _images, _cross_entropy, make_optimizer=lambda model: torch.optim.LBFGS(model.parameters()))
