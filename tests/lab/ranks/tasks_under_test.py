"""Small tasks, each with one thing that goes wrong easily in data-parallel training."""

from typing import Any

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


LIMIT = 2e-3  # some of these gradients are larger, some are smaller


class _Clamp(torch.autograd.Function):
    """Clamps the gradient that flows through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-LIMIT, LIMIT)


class _Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Clamp.apply(x)


def _with_clamp() -> nn.Module:
    model = _mlp()
    model.insert(3, _Clamped())
    return model


def _with_module_hook() -> nn.Module:
    model = _mlp()
    model[4].register_full_backward_hook(lambda _, given, __: tuple(g.clamp(-LIMIT, LIMIT) for g in given))
    return model


def _with_parameter_hooks() -> nn.Module:
    """Each clips by the norm of the whole gradient of its parameter: not linear, and not element by element."""
    model = _mlp()
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g * (0.02 / g.norm().clamp(min=1e-12)).clamp(max=1.0))
    return model


def _clamped_tokens() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), _Clamped(), nn.Linear(16, 6))


def _clamped_convolutions() -> nn.Module:
    model = _convolutions()
    model.insert(3, _Clamped())
    return model


clamped = Task(_with_clamp, _images, _cross_entropy)
clamped_batchnorm = Task(_clamped_convolutions, _images, _cross_entropy)
clamped_tokens = Task(_clamped_tokens, lambda _: _Sequences(), _token_loss)
module_hook = Task(_with_module_hook, _images, _cross_entropy)
parameter_hooks = Task(_with_parameter_hooks, _images, _cross_entropy)


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


def _joint_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    from tests.strategies.shampoo import Joint  # other tasks of this file are trained without the package of the tests

    return Joint(model.parameters())


joint = Task(_mlp, _images, _cross_entropy, make_optimizer=_joint_optimizer)


def _muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    hidden, rest = [model[4].weight], [p for p in model.parameters() if p is not model[4].weight]
    return [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=0.003)]


muon = Task(_mlp, _images, _cross_entropy, make_optimizer=_muon_and_adamw, make_schedule=_falling)
lbfgs = Task(_mlp, _images, _cross_entropy, make_optimizer=lambda model: torch.optim.LBFGS(model.parameters()))
