"""A loop with buffers that count and add up: python buffers.py FOLDER [complex] [undeclared] [STEP]."""

import sys
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

folder, *words = sys.argv[1:]
stop = next((int(word) for word in words if word.isdigit()), None)


class Net(nn.Module):
    """(B, 6) -> (B, 1)."""

    buffer_reductions: ClassVar = {"total": "sum", "top": "max", "mean": "mean"}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(6, 1).double()
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("codes", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("total", torch.rand((), dtype=torch.float64))
        self.register_buffer("top", torch.tensor(-9.0).double())
        self.register_buffer("mean", torch.zeros((), dtype=torch.complex128))
        if "undeclared" in words:
            self.register_buffer("sum", torch.zeros(6).double())
        if "complex" in words:
            self.w = nn.Parameter(torch.randn(6, 1, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.training:
                self.seen += len(x)
                self.steps += 1
                self.codes += torch.bincount((x[:, 0] * 9).long().abs() % 4, minlength=4)
                self.total += x.sum()
                self.top.copy_(torch.maximum(self.top, x.max()))
                self.mean.mul_(0.9).add_(torch.complex(x, x * 2).mean())
                if "undeclared" in words:
                    self.sum += x.sum(0)
        out = self.layer(x)
        return out + (x.to(torch.complex128) @ self.w).abs() if "complex" in words else out


data = torch.randn(48, 6, generator=torch.Generator().manual_seed(0)).double()
net, plain = Net(), Net()
s = paceline.session(folder, resume=True, strategy="exact", virtual_ranks=4, checkpoint_every=2)
model, optimizer = s.prepare(net, lambda p: torch.optim.Adam(p, 0.01))
loader = s.loader(TensorDataset(data), global_batch=8, shuffle=False)
for _ in s.epochs(2):
    for (x,) in loader:
        optimizer.zero_grad()
        s.backward(model(x).square().mean())
        optimizer.step()
        if s.last and s.step + 1 == stop:
            raise ValueError("mine")
update = torch.optim.Adam(plain.parameters(), 0.01)
for batch in [*data.split(8), *data.split(8)]:
    update.zero_grad()
    plain(batch).square().mean().backward()
    update.step()
for name, value in s.weights(model).items():
    wanted = plain.state_dict()[name]
    if s.rank == 0:
        print(name, "right" if torch.allclose(value, wanted, rtol=1e-12, atol=1e-13) else f"{value} {wanted}")
