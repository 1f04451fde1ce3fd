"""Finds lists and dictionaries of tensors in the user's code that change with a model and are not in checkpoints.

A list that the loop creates in each step is not state. A container is state if it is the same object in two searches,
and its tensors have changed in between. A reference keeps it alive between searches, so that its id stays unique.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.rank.sites import LIBRARY, USER, owner
from paceline.sessions.assumptions import STATE
from paceline.sessions.containers import elements_of, is_plain, storage, storages, tensors_of
from paceline.sessions.sharded_tensors import local_shard
from paceline.train.consistency import checksum

DEPTH = 3  # of nested objects and containers, from a name in the user's code
MOST_PARTS, MOST_OBJECTS = 1000, 20_000  # that are searched: in one container, and in total
FIRST_STEPS = 2
Shapes = list[tuple[tuple[int, ...], bool]]


@dataclass
class _Seen:
    container: Any
    sums: list[int]
    is_late: bool
    """whether it was created during the training"""
    is_new: bool = True
    """whether it was found in one search only"""


class UnsavedContainers:
    """The containers in the last search that may be state of the training."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._step, self._last_look = 0, -1

    def step_ended(self) -> bool:
        """Release containers that the loop no longer has. Returns whether a search is due."""
        self._step += 1
        for key in [key for key, entry in self._seen.items() if sys.getrefcount(entry.container) <= 2]:
            del self._seen[key]
        return self._step <= FIRST_STEPS or any(entry.is_new for entry in self._seen.values())

    def look(
        self, models: list[nn.Module], optimizers: Sequence[Optimizer], known: Iterable[Any],
        say: Callable[[str], None], *, again: bool = False,
    ) -> None:  # fmt: skip
        """Search the user's variables. `again`, after the first step: only the containers of the last search.

        Raises:
            UsageError: if a container has changed and is not part of the `known` objects.
        """
        if self._last_look == self._step:
            return
        self._last_look = self._step
        known_storages = storages([*tensors_of(models), *(p.grad for model in models for p in model.parameters())])
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        known_storages |= storages(value for state in states for value in state.values())
        candidates = [
            shapes for model in models for shapes in _shapes_of(model) if len(shapes) > 1 or any(shapes[0][0])
        ]
        skip = {id(value) for _, value in _walk([("", root) for root in (*optimizers, *known)])}
        containers: dict[int, _Seen] = {}
        for name, value in _walk(_names(sys._getframe()), skip):  # pyright: ignore[reportPrivateUsage]
            previous = self._seen.get(id(value))
            if previous is None and again and self._step > 1:
                continue
            tensors = _tensors(value, max(map(len, candidates), default=0))
            tensors = [tensor for tensor in tensors if storage(tensor) not in known_storages]
            if not tensors or _shapes(tensors) not in candidates:
                continue
            sums = [int(checksum(local_shard(tensor))) for tensor in tensors]
            kind = type(value).__name__
            if previous is None:
                containers[id(value)] = _Seen(value, sums, is_late=self._step > 0)
                continue
            if previous.sums != sums:
                raise STATE.error(f"a {kind} of tensors, {name},")
            if previous.is_new and previous.is_late:
                say(
                    f"the loop created a {kind} of tensors, {name}: no checkpoint has it, and it is missing after a "
                    "resume. To save it, put it into a dict that is registered with s.register before the loop"
                )
            previous.is_new, containers[id(value)] = False, previous
        self._seen = containers


def _names(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The variables of the user's running functions, and the globals of their modules."""
    while frame is not None:
        if owner(frame.f_code.co_filename) is USER:
            variables: Any = frame.f_locals
            names = [*variables.items()]
            # before Python 3.13 it is a copy that the frame would keep, with objects such as a loss and its graph. It
            # is not cleared if the user refers to it by locals()
            is_copy = frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(variables) is dict
            if is_copy and sys.getrefcount(variables) <= 3:
                variables.clear()
            yield from names
            yield from [*frame.f_globals.items()]
        frame = frame.f_back


def _walk(roots: Iterable[tuple[str, Any]], skip: Iterable[int] = ()) -> Iterator[tuple[str, Any]]:
    """All containers and user objects among the roots and inside them, each once."""
    queue = [(name, value, 0) for name, value in roots if not name.startswith("__")]
    seen_ids = set(skip)
    for name, value, depth in queue:  # grows
        cls = type(value)
        is_container = issubclass(cls, (list, tuple, dict))
        if id(value) in seen_ids or not (is_container or not name or _is_users(cls)):
            continue
        seen_ids.add(id(value))
        yield name, value
        if depth < DEPTH and len(queue) < MOST_OBJECTS:
            queue += [(*part, depth + 1) for part in _parts(name, value)]


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    if issubclass(type(value), dict):
        items = [] if len(value) > MOST_PARTS else [*dict.items(value)]
        return [(f"{name}[{key!r}]" if isinstance(key, (str, int)) else f"{name}[...]", part) for key, part in items]
    if issubclass(type(value), (list, tuple)):
        return [] if len(value) > MOST_PARTS else [(f"{name}[{n}]", part) for n, part in enumerate(value)]
    is_module = issubclass(type(value), nn.Module)  # `RegisteredObjects` checks its tensors
    attributes: dict[str, Any] = {}
    with suppress(Exception):  # a proxy object may raise any error
        attributes = value.__dict__
    return [(f"{name}.{key}", part) for key, part in [*attributes.items()] if not (is_module and key[:1] == "_")]


def _is_users(cls: type) -> bool:
    return not issubclass(cls, ModuleType) and _is_users_file(str(cls.__module__))


@cache
def _is_users_file(module: str) -> bool:
    if module == "__main__":
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and owner(file) in (USER, LIBRARY)


def _tensors(container: Any, limit: int) -> list[Tensor]:
    """The plain tensors in a container and in the containers inside it; empty if there are many more than `limit`."""
    parts = elements_of(container)
    tensors: list[Tensor] = []
    for part in parts if len([*parts]) <= MOST_PARTS + limit else ():
        tensors += filter(is_plain, elements_of(part) or [part])
        if len(tensors) > 4 * limit:
            return []
    return tensors


def _shapes(tensors: Iterable[Tensor]) -> Shapes:
    return sorted((tuple(tensor.shape), tensor.is_floating_point()) for tensor in tensors)


def _shapes_of(model: nn.Module) -> Iterator[Shapes]:
    """The shapes that a copy of the model may have: parameters, trainable ones, the state_dict, its float tensors."""
    parameters = [*model.parameters()]
    yield _shapes(parameters)
    yield _shapes(p for p in parameters if p.requires_grad)
    state = [p for _, p in model.named_parameters(remove_duplicate=False)]
    for module in model.modules():
        hidden: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        state += [b for name, b in module.named_buffers(recurse=False) if name not in hidden]
    yield _shapes(state)
    yield _shapes(tensor for tensor in state if tensor.is_floating_point())
