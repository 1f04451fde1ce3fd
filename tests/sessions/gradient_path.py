"""Loops with something on the gradient path that is not linear, beside the plain loop: `gradient_path.py KIND`."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import paceline

torch.set_default_dtype(torch.float64)
KIND = sys.argv[1]
PARTS = int(sys.argv[3]) if len(sys.argv) > 3 else None  # with it, losses have weights
SEEN: list[float] = []


class Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(38, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], torch.tensor(i / 40)


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.01, 0.01)


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if KIND == "tensor":
            x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        elif KIND == "watched":
            x.register_hook(lambda gradient: SEEN.append(float(gradient.abs().max())))
        elif KIND == "reentrant":
            return checkpoint(Clamp.apply, x, use_reentrant=True)
        elif KIND == "function":
            return Clamp.apply(x)
        return x


def clamp_after(parameter: Tensor) -> None:
    parameter.grad.clamp_(-0.05, 0.05)


def model() -> nn.Module:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Clamped(), nn.Linear(8, 1))
    if KIND in ("hook", "masked", "accumulated"):
        made[3].weight.register_hook(lambda g: g.clamp(-0.05, 0.05))
    if KIND == "after":
        made[3].weight.register_post_accumulate_grad_hook(clamp_after)
    if KIND == "module":
        made[1].register_full_backward_hook(lambda _, given, __: (given[0].clamp(-0.01, 0.01),))
    return made


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """A mean, and what it is the mean of if that is not the samples."""
    squares = (net(x).squeeze(1) - y) ** 2
    if KIND != "masked" and not PARTS:
        return squares.mean(), None
    mask = (y * 40).round() % 3 != 0  # other weights on each rank
    return (squares * mask).sum() / mask.sum(), mask.sum()


def changed(net: nn.Module, backward, zero_every: int = 1) -> Tensor:
    """The weights after two epochs."""
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(2):
        for number, (x, y) in enumerate(DataLoader(Rows(), batch_size=8)):
            if number % zero_every == 0:
                optimizer.zero_grad()
            backward(loss_of(net, x, y)[0])
            if (number + 1) % zero_every == 0:
                optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


EVERY = 2 if KIND == "accumulated" else 1
wanted = changed(model(), lambda loss: loss.backward(), EVERY)
with paceline.session(strategy=sys.argv[2], virtual_ranks=PARTS) as s:
    net, optimizer = s.prepare(model(), lambda p: torch.optim.SGD(p, 0.05))
    for _ in s.epochs(2):
        for x, y in s.loader(Rows(), global_batch=8, shuffle=False):
            if s.batch % EVERY == 0:
                optimizer.zero_grad()
            loss, weight = loss_of(net, x, y)
            s.backward(loss, weight)
            if (s.batch + 1) % EVERY == 0:
                optimizer.step()
    found = torch.cat([tensor.flatten() for tensor in s.weights(net).values()])
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    s.main(Path("difference").write_text, f"{difference:.3e}")
