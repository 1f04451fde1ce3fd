"""The exponential moving average of the weights (--ema): kept beside them, evaluated and saved in their place."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from paceline.checkpoint.state import Source, TensorShard, load_into
from paceline.strategies.base import Strategy

PREFIX = "ema/"


class Average:
    """Of the parameters as this rank holds them, so under every strategy alike and with the same bits."""

    def __init__(self, replica: Strategy, decay: float) -> None:
        """It begins as the weights are; `decay` of the old average stays at each update."""
        held = [held for held in replica.state() if held.name.startswith("model/")]
        self._held = [one for one in held if one.tensor.is_floating_point() or one.tensor.is_complex()]
        self._weights = [one.tensor for one in self._held]
        self._average = [tensor.clone() for tensor in self._weights]
        self._decay = decay

    def begin(self) -> None:
        """Begin as the weights are now."""
        _copy(self._weights, self._average)

    @torch.no_grad()
    def update(self) -> None:
        """The weights have changed."""
        torch._foreach_lerp_(self._average, self._weights, 1 - self._decay)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]

    def state(self) -> list[TensorShard]:
        """Its tensors, under names of their own."""
        pairs = zip(self._held, self._average, strict=True)
        return [replace(one, name=PREFIX + one.name.removeprefix("model/"), tensor=tensor) for one, tensor in pairs]

    @torch.no_grad()
    def load(self, source: Source) -> None:
        """Take over what `state` gave; or begin as the weights are, where a checkpoint has none."""
        self.begin()
        for held in self.state() if [*source.names(PREFIX)] else ():
            load_into(source, held)

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Inside, the model has the average for its weights."""
        weights = [tensor.clone() for tensor in self._weights]
        _copy(self._average, self._weights)
        try:
            yield
        finally:
            _copy(weights, self._weights)


@torch.no_grad()
def _copy(source: list[Tensor], into: list[Tensor]) -> None:
    for old, new in zip(into, source, strict=True):
        old.copy_(new)
