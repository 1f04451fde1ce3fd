"""The state of a training as a list of named tensors, which a strategy gives to be saved and takes back.

Names belong to the model, never to a strategy or a rank, so any strategy on any number of ranks can take over:

    model/conv1.weight                 a parameter
    buffers/3/bn1.running_mean         a buffer of virtual rank 3
    buffers/bn1.running_mean           a buffer that is the same for all virtual ranks (synchronised batch norm)
    optimizer/conv1.weight/exp_avg     what the optimizer keeps for a parameter
    optimizer/conv1.weight/step.item   a plain number that it keeps

Random streams and the order of samples need no tensor: both are derived from the seed and the number of steps done.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import UsageError


@dataclass(frozen=True)
class Held:
    """A tensor of the state, or a run of its elements, as one rank holds it."""

    name: str
    tensor: Tensor
    whole: torch.Size | None = None
    """the shape of the whole tensor, if `tensor` (flat then) is only a run of its elements that begins at `start`"""
    start: int = 0
    replicated: bool = True
    """whether every rank holds the same, so that one can save it for all"""
    count: int = 1
    """of how many such runs, equally long, `tensor` is made of"""
    apart: int = 0
    """where there are several: elements from the begin of one to that of the next"""
    spare: bool = False
    """whether another rank holds this as well, though not all do, and saves it"""

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return self.tensor.shape if self.whole is None else self.whole

    def place(self, flat: Tensor) -> Tensor:
        """Where `tensor` lies in the whole one, given flat: a view, (runs, elements of each)."""
        return place(flat, self.start, self.tensor.numel() // self.count, self.count, self.apart)


def place(flat: Tensor, start: int, length: int, count: int, apart: int) -> Tensor:
    """(count, length): a view of so many runs of elements, contiguous `flat` being the whole."""
    return flat.as_strided((count, length), (apart or length or 1, 1), flat.storage_offset() + start)


class Source(Protocol):
    """A state to be taken over, wherever it is."""

    def names(self, prefix: str) -> Iterable[str]:
        """All names that begin with `prefix`."""
        ...

    def shape(self, name: str) -> torch.Size:
        """Of the whole tensor `name`, which must be there."""
        ...

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | None:
        """The whole tensor in its shape, or its elements [start, stop) as (stop - start,); None if there is none.

        On the CPU, and a copy: the caller may keep it.
        """
        ...


class Under:
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
    """The whole tensor `name`; with `any_type`, of whatever type of number.

    Raises:
        UsageError: if it is not there or does not fit: the state is of another model.
    """
    tensor = source.tensor(name)
    if tensor is None or tensor.shape != like.shape or (tensor.dtype != like.dtype and not any_type):
        found = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
        raise UsageError(code="state-does-not-fit", name=name, shape=tuple(like.shape), dtype=like.dtype, found=found)
    return tensor


@torch.no_grad()
def take_over(source: Source, held: Held) -> None:
    """Fill `held`, in place, with what was saved under its name: the whole, or its run of elements.

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
        needed(source, held.name, held.tensor.new_empty(1).expand(held.whole))  # says what is wrong
    else:
        held.tensor.copy_(values.view(held.tensor.shape))
