"""The state of a training: a list of named tensors, which a strategy returns for saving, and loads.

Names never depend on a strategy or a rank. Any strategy on any number of ranks can therefore load the state:

    model/conv1.weight                 a parameter
    buffers/3/bn1.running_mean         a buffer of virtual rank 3
    buffers/bn1.running_mean           a buffer that is the same for all virtual ranks (synchronized batch norm)
    optimizer/conv1.weight/exp_avg     the optimizer's state of a parameter
    optimizer/conv1.weight/step.item   a plain number in this state

Random streams and the order of samples need no tensors: both are computed from the seed and the number of steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from paceline.errors import UsageError


@dataclass(frozen=True)
class TensorShard:
    """A tensor of the state, or ranges of its elements, on one rank."""

    name: str
    tensor: Tensor
    unsharded_shape: torch.Size | None = None
    """None for a full tensor. Otherwise the full shape; `tensor` then has its elements from `start`, flat."""
    start: int = 0
    replicated: bool = True  # whether all ranks have the same values: one rank saves them for all
    count: int = 1  # the number of ranges of the same length in `tensor`
    range_stride: int = 0  # the number of elements from the start of a range to the start of the next one
    is_saved_elsewhere: bool = False  # whether some other rank (not all) has the same values and saves them

    @property
    def full_shape(self) -> torch.Size:
        return self.tensor.shape if self.unsharded_shape is None else self.unsharded_shape

    @property
    def is_unique(self) -> bool:
        """Whether only this rank saves it."""
        return not (self.replicated or self.is_saved_elsewhere)

    def view_in(self, flat: Tensor) -> Tensor:
        """A view, (count, elements of each), of these elements in the full tensor `flat`."""
        return make_strided_view(flat, self.start, self.tensor.numel() // self.count, self.count, self.range_stride)


def make_strided_view(flat: Tensor, start: int, length: int, count: int, apart: int) -> Tensor:
    """A view, (count, length), of `count` ranges of elements of the contiguous tensor `flat`."""
    return flat.as_strided((count, length), (apart or length or 1, 1), flat.storage_offset() + start)


def unsharded_parameter_shards(named: Iterable[tuple[str, Tensor]]) -> list[TensorShard]:
    return [TensorShard(f"model/{name}", parameter.detach()) for name, parameter in named]


class StateSource(Protocol):
    """A saved state, in memory or on disk."""

    def names(self, prefix: str) -> Iterable[str]: ...  # all that begin with `prefix`
    def shape(self, name: str) -> torch.Size: ...  # the full shape of a tensor that exists
    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | None:
        """The tensor in its full shape, or its elements [start, stop) as (stop - start,); None if it does not exist.

        A copy on the CPU, which the caller may keep.
        """


class PrefixedSource:
    """The tensors of a source whose names begin with `prefix`, which is removed from the names."""

    def __init__(self, source: StateSource, prefix: str) -> None:
        self._source, self._prefix = source, prefix

    def names(self, prefix: str) -> Iterable[str]:
        return [name.removeprefix(self._prefix) for name in self._source.names(self._prefix + prefix)]

    def shape(self, name: str) -> torch.Size:
        return self._source.shape(self._prefix + name)

    def tensor(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | None:
        return self._source.tensor(self._prefix + name, start, stop)


def read_matching_tensor(source: StateSource, name: str, like: Tensor, *, any_type: bool = False) -> Tensor:
    """The tensor `name`, with the shape of `like`, and its type unless `any_type`."""
    tensor = source.tensor(name)
    if tensor is None or tensor.shape != like.shape or (tensor.dtype != like.dtype and not any_type):
        actual = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
        raise UsageError(code="state-does-not-fit", name=name, shape=tuple(like.shape), dtype=like.dtype, found=actual)
    return tensor


@torch.no_grad()
def load_shard(source: StateSource, shard: TensorShard) -> None:
    """Copy the saved tensor, or its range of elements, into `shard`."""
    if shard.unsharded_shape is None:
        shard.tensor.copy_(read_matching_tensor(source, shard.name, shard.tensor))
        return
    exists = shard.name in source.names(shard.name) and source.shape(shard.name) == shard.unsharded_shape
    values = None
    if exists and shard.count == 1:
        values = source.tensor(shard.name, shard.start, shard.start + shard.tensor.numel())
    elif exists and (full := source.tensor(shard.name)) is not None:
        values = shard.view_in(full.reshape(-1))
    if values is None or values.dtype != shard.tensor.dtype:
        like = shard.tensor.new_empty(1).expand(shard.unsharded_shape)
        read_matching_tensor(source, shard.name, like)  # raises the error
    else:
        shard.tensor.copy_(values.view(shard.tensor.shape))


# ---- a state in the checkpoint of a run


@dataclass(frozen=True)
class LockedRun:
    folder: Path
    attempt: int
    generation: int
    attempt_dir: Path | None  # None except on rank 0
    definition: dict[str, Any] = field(default_factory=dict[str, Any])
    notices: list[str] = field(default_factory=list[str])  # messages to print before the first step


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A state without its tensors."""

    samples_seen: int
    metrics: dict[str, float]
    definition: dict[str, Any]
    evaluated: int = 0  # the step of the metrics
    loop: dict[str, Any] = {}  # the position of a custom loop, and the numbers of its optimizers and schedulers
    names: list[dict[str, list[str]]] = []  # see `state_dict_names_by_saved_name`; one for each model


@dataclass(frozen=True)
class ResumePoint:
    step: int
    trainer_state: TrainerState
    source: StateSource
    location_text: str  # the location, for messages
    memory_file_descriptors: frozenset[int] = frozenset()  # the memory files of a snapshot
