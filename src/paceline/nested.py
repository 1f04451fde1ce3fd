"""Find the tensors in a batch or in the outputs of a model: in nested tuples, lists, mappings and dataclasses."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Mapping):
        value = [*value.values()]
    elif _is_record(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, Tensor):
        yield value


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of `value` with `change(tensor)` in place of each tensor. Containers keep their types."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        result = copy.copy(value)  # keeps the type and all other attributes
        for key in value:
            result[key] = map_tensors(value[key], change)
        return result
    if isinstance(value, Mapping):
        return {key: map_tensors(part, change) for key, part in value.items()}
    if isinstance(value, PackedSequence):  # torch needs its batch_sizes on the CPU
        names = ("data", "sorted_indices", "unsorted_indices")
        return value._replace(**{name: map_tensors(getattr(value, name), change) for name in names})
    if isinstance(value, (list, tuple)):
        parts = [map_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if _is_record(value):
        result = copy.copy(value)
        for field in dataclasses.fields(value):  # object.__setattr__ works for frozen classes, and skips __post_init__
            object.__setattr__(result, field.name, map_tensors(getattr(value, field.name), change))
        return result
    return value


def batch_size(batch: Any) -> int | None:
    """The length of the first tensor in `batch` that has a length; None if there is none."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.ndim), None)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
