"""The exponential moving average (EMA) of the weights, for `--ema`. Evaluations use it, and it is saved in a file."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from paceline.checkpoint.state import StateSource, TensorShard, load_shard

PREFIX = "ema/"


class EmaWeights:
    """The average of this rank's shards of the parameters. It has the same bits with every strategy.

    Each update computes `decay * average + (1 - decay) * weights`. The initial value is the current weights.
    """

    def __init__(self, state: Sequence[TensorShard], decay: float) -> None:
        shards = [shard for shard in state if shard.name.startswith("model/")]
        self._shards = [shard for shard in shards if shard.tensor.is_floating_point() or shard.tensor.is_complex()]
        self._weights = [shard.tensor for shard in self._shards]
        self._average = [tensor.clone() for tensor in self._weights]
        self._decay = decay

    def reset(self) -> None:
        _copy(self._weights, self._average)

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self._average, self._weights, 1 - self._decay)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]

    def state(self) -> list[TensorShard]:
        pairs = zip(self._shards, self._average, strict=True)
        return [replace(shard, name=PREFIX + shard.name.removeprefix("model/"), tensor=value) for shard, value in pairs]

    @torch.no_grad()
    def load(self, source: StateSource) -> None:
        self.reset()
        for shard in self.state() if [*source.names(PREFIX)] else ():
            load_shard(source, shard)

    @contextmanager
    def use_as_weights(self) -> Generator[None]:
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
