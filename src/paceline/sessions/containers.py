"""Adapters for registered objects without a state_dict: dictionaries and lists of tensors, random generators."""

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.sessions.order import generator_state, set_generator_state
from paceline.sessions.sharded_tensors import distribute_like, is_dtensor, local_shard


class RegisteredContainer:
    """A dict or list of tensors, numbers and strings, also in nested dicts, lists and tuples."""

    def __init__(self, thing: dict[Any, Any] | list[Any], name: str, device: torch.device, models: set[int]) -> None:
        self.thing, self._name, self._device, self._models = thing, name, device, models

    def state_dict(self) -> dict[str, Any]:
        return self._described(self.thing)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored(self.thing, state)

    @property
    def is_unreferenced(self) -> bool:
        """Whether only the session refers to the container or a tensor of it, so the loop can no longer change it."""
        parts = [*container_elements(self.thing)]
        if sys.getrefcount(self.thing) > 2:
            return False
        # references to a tensor: `parts`, the container, the name in the loop and the argument
        return not parts or any(sys.getrefcount(part) <= 4 for part in parts)

    def _described(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Tensor):
            return {"tensor": value, "device": value.device.type, "cut": is_dtensor(value)}
        if isinstance(value, dict):
            if bad_keys := [key for key in value if not isinstance(key, (str, int))]:  # pyright: ignore
                raise UsageError(code="register-dict-key", name=self._name, kind=type(bad_keys[0]).__name__)
            return {"entries": {key: self._described(part) for key, part in value.items()}}  # pyright: ignore
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [self._described(part) for part in value]}  # pyright: ignore
        return {"value": value}

    def _restored(self, current: Any, saved: Mapping[str, Any]) -> Any:
        if "tensor" in saved:
            tensor: Tensor = saved["tensor"]
            fits = isinstance(current, Tensor) and current.shape == tensor.shape and current.dtype == tensor.dtype
            if fits and storage_address(current) not in self._models:
                with torch.no_grad():
                    return current.copy_(distribute_like(tensor, like=current))
            if saved["cut"]:
                raise UsageError(code="register-lost-tensor", name=self._name)
            return tensor if saved["device"] == "cpu" else tensor.to(self._device)
        if "entries" in saved:
            table: dict[Any, Any] = current if isinstance(current, dict) else {}
            entries = {key: self._restored(table.get(key), part) for key, part in saved["entries"].items()}
            table.clear()
            table.update(entries)
            return table
        if "value" in saved:
            return saved["value"]
        (type_name, parts), *_ = saved.items()
        elements: Any = current if isinstance(current, (list, tuple)) else ()
        restored = [self._restored(elements[n] if n < len(elements) else None, part) for n, part in enumerate(parts)]
        if type_name == "tuple":
            return tuple(restored)
        target: list[Any] = current if isinstance(current, list) else []
        target[:] = restored
        return target


class GeneratorStateAdapter:
    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def state_dict(self) -> dict[str, Any]:
        return {"generator": generator_state(self.thing)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_generator_state(self.thing, state["generator"])


def container_elements(container: Any) -> Iterable[Any]:
    if issubclass(type(container), dict):
        return [*dict.values(container)]
    return [*container] if issubclass(type(container), (list, tuple)) else []


def storage_address(tensor: Tensor) -> int:
    """The address of the tensor's storage: equal for all views of a tensor."""
    return local_shard(tensor.detach()).untyped_storage().data_ptr()


def has_storage_address(value: Any) -> bool:
    cls = type(value)
    if not issubclass(cls, Tensor) or not (cls in (Tensor, torch.nn.Parameter) or is_dtensor(value)):
        return False
    return value.layout is torch.strided and not value.is_meta and value.numel() > 0


def storage_addresses(tensors: Iterable[Tensor | None]) -> set[int]:
    return {storage_address(tensor) for tensor in tensors if has_storage_address(tensor) and tensor is not None}


def tensors_of_models(models: Iterable[torch.nn.Module]) -> Iterator[Tensor]:
    for model in models:
        yield from model.parameters()
        yield from model.buffers()


def find_live_instances(kind: type) -> list[Any]:
    """All instances of a class in this process, including objects that are frozen for forks. Takes about 0.1 s."""
    classes = [kind]
    for cls in classes:
        classes += set(type.__subclasses__(cls)).difference(classes)
    if num_frozen := gc.get_freeze_count():
        gc.unfreeze()
    # Every object refers to its class. This search takes 0.04 s, but compares each reference with each class.
    objects = gc.get_referrers(*classes) if len(classes) <= 32 else gc.get_objects()
    if num_frozen:
        gc.freeze()
    return [*compress(objects, map({*classes}.__contains__, map(type, objects)))]
