"""The state of a training as a list of named tensors, which a strategy returns to be saved, and loads.

Names belong to the model, never to a strategy or a rank, so any strategy on any number of ranks can load it:

    model/conv1.weight                 a parameter
    buffers/3/bn1.running_mean         a buffer of virtual rank 3
    buffers/bn1.running_mean           a buffer that is the same for all virtual ranks (synchronised batch norm)
    optimizer/conv1.weight/exp_avg     the optimizer's state of a parameter
    optimizer/conv1.weight/step.item   a plain number in this state

Random streams and the order of samples need no tensor: both are derived from the seed and the number of steps done.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import UsageError


@dataclass(frozen=True)
class TensorShard:
    """A tensor of the state, or a run of its elements, as one rank holds it."""

    name: str
    tensor: Tensor
    whole: torch.Size | None = None
    """the shape of the whole tensor, if `tensor` (flat then) is a run of its elements that begins at `start`"""
    start: int = 0
    replicated: bool = True
    """whether every rank has the same values, so that one can save them for all"""
    count: int = 1
    """the number of such runs, of the same length, in `tensor`"""
    apart: int = 0
    """the number of elements from the start of one run to the start of the next"""
    spare: bool = False
    """whether another rank, but not every rank, has the same values, and saves them"""

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.tensor.shape if self.whole is None else self.whole

    def place(self, flat: Tensor) -> Tensor:
        """The elements of `tensor` in the whole one, given flat: a view, (runs, elements of each)."""
        return place(flat, self.start, self.tensor.numel() // self.count, self.count, self.apart)


def place(flat: Tensor, start: int, length: int, count: int, apart: int) -> Tensor:
    """(count, length): a view of `count` runs of elements of the contiguous tensor `flat`."""
    return flat.as_strided((count, length), (apart or length or 1, 1), flat.storage_offset() + start)


def whole_parameters(named: Iterable[tuple[str, Tensor]]) -> list[TensorShard]:
    """The parameters of a model, unsharded."""
    return [TensorShard(f"model/{name}", parameter.detach()) for name, parameter in named]


class Source(Protocol):
    """A state to be loaded, in memory or on disk."""

    def names(self, prefix: str) -> Iterable[str]:
        """All names that begin with `prefix`."""
        ...

    def shape(self, name: str) -> torch.Size:
        """The shape of the whole tensor `name`, which must exist."""
        ...

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | None:
        """The whole tensor in its shape, or its elements [start, stop) as (stop - start,); None if there is none.

        On the CPU, and a copy: the caller may keep it.
        """


class PrefixedSource:
    """The tensors of a source whose names begin with `prefix`, without it."""

    def __init__(self, source: Source, prefix: str) -> None:
        self._source, self._prefix = source, prefix

    def names(self, prefix: str) -> Iterable[str]:
        """See Source."""
        return [name.removeprefix(self._prefix) for name in self._source.names(self._prefix + prefix)]

    def shape(self, name: str) -> torch.Size:
        """See Source."""
        return self._source.shape(self._prefix + name)

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | None:
        """See Source."""
        return self._source.tensor(self._prefix + name, start, stop)


def needed(source: Source, name: str, like: Tensor, *, any_type: bool = False) -> Tensor:
    """The whole tensor `name`; with `any_type`, of any type of number.

    Raises:
        UsageError: if it does not exist or does not fit: the state is of a different model.
    """
    tensor = source.tensor(name)
    if tensor is None or tensor.shape != like.shape or (tensor.dtype != like.dtype and not any_type):
        found = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
        raise UsageError(code="state-does-not-fit", name=name, shape=tuple(like.shape), dtype=like.dtype, found=found)
    return tensor


@torch.no_grad()
def load_into(source: Source, held: TensorShard) -> None:
    """Copy into `held` the tensor that was saved under its name: the whole, or its run of elements.

    Raises:
        UsageError: as `needed`.
    """
    if held.whole is None:
        held.tensor.copy_(needed(source, held.name, held.tensor))
        return
    there = held.name in source.names(held.name) and source.shape(held.name) == held.whole
    values = None
    if there and held.count == 1:
        values = source.tensor(held.name, held.start, held.start + held.tensor.numel())
    elif there and (whole := source.tensor(held.name)) is not None:
        values = held.place(whole.reshape(-1))
    if values is None or values.dtype != held.tensor.dtype:
        needed(source, held.name, held.tensor.new_empty(1).expand(held.whole))  # raises the error
    else:
        held.tensor.copy_(values.view(held.tensor.shape))
