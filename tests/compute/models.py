"""Models with everything that computing again could change: batch norm, dropout, draws of other streams, buffers."""

import random

import numpy as np
import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Its output depends on every random stream, and on a buffer that it changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width), nn.ReLU(), nn.Dropout(0.3))
        self.out = nn.Linear(4 * width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.calls += 1
        drawn = 1 + random.random() + float(np.random.rand())
        return x + self.out(self.inner(x * drawn + self.calls)) * scale  # what is drawn is in what backward needs


class Model(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, self.blocks[0]]:  # one of them twice
            x = block(x, scale=x.new_ones(()))
        return self.head(x)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean((2, 3)))
