"""The numbers of optimizers and schedulers as JSON, and the tensors of several models in one state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.state import Source
from paceline.errors import UsageError


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


def as_json(value: Any) -> Any:
    """`value` as JSON that `from_json` turns back: numbers, words, lists and tables of them.

    Raises:
        UsageError: for anything else, which only pickle could save, and loading a pickle runs what it says.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, (list, tuple)):
        return [as_json(part) for part in value]
    if isinstance(value, Mapping):
        return {"table": [[as_json(key), as_json(part)] for key, part in value.items()]}
    raise UsageError(f"a {type(value).__name__} in the state of a scheduler or optimizer cannot be saved: only numbers")


def from_json(value: Any) -> Any:
    """What `as_json` was given; tuples come back as lists."""
    if isinstance(value, list):
        return [from_json(part) for part in value]
    if isinstance(value, dict) and "float" in value:
        return float.fromhex(value["float"])
    if isinstance(value, dict):
        return {from_json(key): from_json(part) for key, part in value["table"]}
    return value


def like(now: Any, saved: Any) -> Any:
    """`saved` as the type that the object at hand has there: a tuple, a Counter, a tensor."""
    if isinstance(now, Tensor):
        return now.fill_(saved)
    kind: Any = type(now)
    return kind(saved) if isinstance(now, (tuple, Mapping)) and saved is not None else saved
