"""What `Session.register` takes although it has no state_dict: dictionaries and lists of tensors, random generators."""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.sessions.order import generator_state, set_generator_state
from paceline.sessions.sharded_tensors import distribute_like, is_dtensor, local_shard

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class TensorContainer:
    """A dict or list of tensors, numbers and words; they may be in dicts, lists and tuples inside it."""

    def __init__(self, thing: dict[Any, Any] | list[Any], name: str, device: torch.device, models: set[int]) -> None:
        """`device`: that of tensors that are added at a resume; `models`: the storages of the models' tensors."""
        self.thing, self._name, self._device, self._models = thing, name, device, models

    def state_dict(self) -> dict[str, Any]:
        """See RegisteredObjects."""
        return self._described(self.thing)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Into the same container, and into the tensors that are there."""
        self._restored(self.thing, state)

    @property
    def is_left(self) -> bool:
        """Whether only the session has it, and a tensor of it, so that the loop can no longer change them."""
        parts = [*elements_of(self.thing)]
        if sys.getrefcount(self.thing) > 2:
            return False
        # `parts`, the container, the name in the loop and the argument have a tensor
        return not parts or any(sys.getrefcount(part) <= 4 for part in parts)

    def _described(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Tensor):
            return {"tensor": value, "device": value.device.type, "cut": is_dtensor(value)}
        if isinstance(value, dict):
            if strange := [key for key in value if not isinstance(key, (str, int))]:  # pyright: ignore
                raise UsageError(code="register-dict-key", name=self._name, kind=type(strange[0]).__name__)
            return {"entries": {key: self._described(part) for key, part in value.items()}}  # pyright: ignore
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [self._described(part) for part in value]}  # pyright: ignore
        return {"value": value}

    def _restored(self, now: Any, saved: Mapping[str, Any]) -> Any:
        """What `_described` was given, in the objects that are there, where they fit."""
        if "tensor" in saved:
            found: Tensor = saved["tensor"]
            fits = isinstance(now, Tensor) and now.shape == found.shape and now.dtype == found.dtype
            if fits and storage(now) not in self._models:
                with torch.no_grad():
                    return now.copy_(distribute_like(found, like=now))
            if saved["cut"]:
                raise UsageError(code="register-lost-tensor", name=self._name)
            return found if saved["device"] == "cpu" else found.to(self._device)
        if "entries" in saved:
            table: dict[Any, Any] = now if isinstance(now, dict) else {}
            entries = {key: self._restored(table.get(key), part) for key, part in saved["entries"].items()}
            table.clear()
            table.update(entries)
            return table
        if "value" in saved:
            return saved["value"]
        (kind, parts), *_ = saved.items()
        before: Any = now if isinstance(now, (list, tuple)) else ()
        restored = [self._restored(before[n] if n < len(before) else None, part) for n, part in enumerate(parts)]
        if kind == "tuple":
            return tuple(restored)
        into: list[Any] = now if isinstance(now, list) else []
        into[:] = restored
        return into


class Generator:
    """The state of a random generator."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def state_dict(self) -> dict[str, Any]:
        """See RegisteredObjects."""
        return {"generator": generator_state(self.thing)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See RegisteredObjects."""
        set_generator_state(self.thing, state["generator"])


def elements_of(container: Any) -> Iterable[Any]:
    """The values of a dict, the elements of a list or tuple; nothing of anything else."""
    if issubclass(type(container), dict):
        return [*dict.values(container)]
    return [*container] if issubclass(type(container), (list, tuple)) else []


def storage(tensor: Tensor) -> int:
    """Where its memory begins: the same for all views of a tensor."""
    return local_shard(tensor.detach()).untyped_storage().data_ptr()


def is_plain(value: Any) -> bool:
    """Whether it is a tensor with memory of its own, as averages are."""
    kind = type(value)
    if not issubclass(kind, Tensor) or not (kind in (Tensor, torch.nn.Parameter) or is_dtensor(value)):
        return False
    return value.layout is torch.strided and not value.is_meta and value.numel() > 0


def storages(tensors: Iterable[Tensor | None]) -> set[int]:
    """Those of plain tensors."""
    return {storage(one) for one in tensors if is_plain(one) and one is not None}


def tensors_of(models: Iterable[torch.nn.Module]) -> Iterator[Tensor]:
    """All their parameters and buffers."""
    for model in models:
        yield from model.parameters()
        yield from model.buffers()
