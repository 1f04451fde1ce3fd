"""Data held as tensors: a whole micro-batch is gathered at once, without Python per sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset


@dataclass(frozen=True)
class ArrayDataset(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is (inputs[i], targets[i]), after `transform`, which is given and returns whole batches of inputs.

    `transform` must treat every sample alike and without chance (normalising, say): a sample must not depend on the
    batch it comes in. Random augmentation belongs into the `__getitem__` of a dataset of your own.
    """

    inputs: Tensor  # (N, ...)
    targets: Tensor  # (N, ...)
    transform: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs but {len(self.targets)} targets")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.gather(torch.tensor([index]))
        return inputs[0], targets[0]

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The batch of samples `indices`: inputs (n, ...) and targets (n, ...)."""
        inputs = self.inputs.index_select(0, indices)
        return (inputs if self.transform is None else self.transform(inputs)), self.targets.index_select(0, indices)


def batch_gatherer(dataset: object) -> Callable[[Tensor], Sequence[Tensor]] | None:
    """How to gather a whole batch of `dataset` at once; None if it can only be asked sample by sample."""
    if isinstance(dataset, ArrayDataset):
        return dataset.gather
    if type(dataset) is TensorDataset:  # not a subclass, which may have a __getitem__ of its own
        tensors = dataset.tensors
        return lambda indices: [t.index_select(0, indices) for t in tensors]
    return None


def held_tensors(dataset: object) -> Sequence[Tensor] | None:
    """The tensors that hold the whole of `dataset`; None if it is no such dataset."""
    if isinstance(dataset, ArrayDataset):
        return (dataset.inputs, dataset.targets)
    return dataset.tensors if type(dataset) is TensorDataset else None
