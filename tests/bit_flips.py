"""Flips one bit in the forward or backward of a model, as a faulty processor or memory does."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Part = Literal["forward", "backward"]


@dataclass(frozen=True)
class Flip:
    """One bit of the output of a module, or of the gradient of this output."""

    part: Part
    module: int
    """the number of a module without children, modulo their number"""
    element: int
    """of the output, modulo its size"""
    bit: int
    """of float32: 31 is the sign, 23 to 30 are the exponent"""
    call: int | None = None
    """the number of the forward since `flipping`; None: each one"""


def flipped(values: Tensor, element: int, bit: int) -> Tensor:
    changed = values.clone()
    with torch.no_grad():
        words = changed.view(-1).view(torch.int32)
        words[element % len(words)] ^= 1 << bit if bit < 31 else -(1 << 31)
    return changed


@dataclass
class Flipper:
    """The hooks on a model that flip bits while `flip` is set."""

    model: nn.Module
    flip: Flip | None = None
    done: int = 0
    """flips so far"""
    _calls: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        self.modules = [module for module in self.model.modules() if not [*module.children()]]
        for number, module in enumerate(self.modules):
            module.register_forward_hook(lambda _, __, output, number=number: self._after_forward(number, output))

    @contextmanager
    def flipping(self, flip: Flip | None) -> Generator[None]:
        self.flip, self._calls, self.done = flip, {}, 0
        try:
            yield
        finally:
            self.flip = None

    def _after_forward(self, number: int, output: Any) -> Any:
        flip = self.flip
        if flip is None or number != flip.module % len(self.modules) or not torch.is_grad_enabled():
            return None
        call = self._calls.get(number, 0)
        self._calls[number] = call + 1
        if flip.call not in (None, call):
            return None
        if flip.part == "forward":
            self.done += 1
            return flipped(output, flip.element, flip.bit)
        output.register_hook(self._on_gradient)
        return None

    def _on_gradient(self, gradient: Tensor) -> Tensor:
        assert self.flip is not None
        self.done += 1
        return flipped(gradient.contiguous(), self.flip.element, self.flip.bit)
