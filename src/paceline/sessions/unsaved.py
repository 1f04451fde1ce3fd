"""Lists and dictionaries of tensors in the user's own code that change with a model, and that no checkpoint has.

A list that is made anew in each step is no state: only a container that is the same object at two looks, and whose
tensors have changed in between, is. From one look to the next it is held, so that no other gets its id.
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
from paceline.sessions.containers import held_by, is_plain, parts_of, storage, storages
from paceline.sessions.elsewhere import own_share
from paceline.train.consistency import checksum

DEPTH = 3  # of objects and containers, from a name in the user's code
MOST_PARTS, MOST_OBJECTS = 1000, 20_000  # of one container that are looked into, and altogether
FIRST_STEPS = 2
Shapes = list[tuple[tuple[int, ...], bool]]


@dataclass
class _Seen:
    container: Any
    sums: list[int]
    is_late: bool
    """whether it was made during the training"""
    is_new: bool = True
    """whether it was seen once only"""


class Containers:
    """Those that may be a state of the training, as they were at the last look."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._step, self._last_look = 0, -1

    def step_ended(self) -> bool:
        """Let go what the loop has let go; whether a look is due."""
        self._step += 1
        for key in [key for key, one in self._seen.items() if sys.getrefcount(one.container) <= 2]:
            del self._seen[key]
        return self._step <= FIRST_STEPS or any(one.is_new for one in self._seen.values())

    def look(
        self, models: list[nn.Module], optimizers: Sequence[Optimizer], known: Iterable[Any],
        say: Callable[[str], None], *, again: bool = False,
    ) -> None:  # fmt: skip
        """Look at all there are; `again`, after the first step: at those of the last look only.

        Raises:
            UsageError: if one has changed that does not belong to the `known` objects.
        """
        if self._last_look == self._step:
            return
        self._last_look = self._step
        taken = storages([*held_by(models), *(p.grad for model in models for p in model.parameters())])
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        taken |= storages(value for state in states for value in state.values())
        wanted = [shapes for model in models for shapes in _shapes_of(model) if len(shapes) > 1 or any(shapes[0][0])]
        skip = {id(value) for _, value in _walk([("", one) for one in (*optimizers, *known)])}
        seen: dict[int, _Seen] = {}
        for name, value in _walk(_names(sys._getframe()), skip):  # pyright: ignore[reportPrivateUsage]
            before = self._seen.get(id(value))
            if before is None and again and self._step > 1:
                continue
            tensors = _tensors(value, max(map(len, wanted), default=0))
            tensors = [one for one in tensors if storage(one) not in taken]
            if not tensors or _shapes(tensors) not in wanted:
                continue
            sums = [int(checksum(own_share(one))) for one in tensors]
            kind = type(value).__name__
            if before is None:
                seen[id(value)] = _Seen(value, sums, is_late=self._step > 0)
                continue
            if before.sums != sums:
                raise STATE.error(f"a {kind} of tensors, {name},")
            if before.is_new and before.is_late:
                say(
                    f"a {kind} of tensors, {name}, was made during the training: no checkpoint has it, and after a "
                    "resume it is not there. To keep it, put it into a dict that s.register was given before the loop"
                )
            before.is_new, seen[id(value)] = False, before
        self._seen = seen


def _names(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """What the user's functions that are running have: their variables, and those of their modules."""
    while frame is not None:
        if owner(frame.f_code.co_filename) is USER:
            found: Any = frame.f_locals
            names = [*found.items()]
            # before Python 3.13 it is a copy, which the frame would keep: a loss with its graph, say. The user may
            # have it as locals(), and then it stays
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(found) is dict and sys.getrefcount(found) <= 3:
                found.clear()
            yield from names
            yield from [*frame.f_globals.items()]
        frame = frame.f_back


def _walk(roots: Iterable[tuple[str, Any]], skip: Iterable[int] = ()) -> Iterator[tuple[str, Any]]:
    """The roots that are containers or the user's objects, and such in them, each once."""
    waiting = [(name, value, 0) for name, value in roots if not name.startswith("__")]
    seen = set(skip)
    for name, value, depth in waiting:  # grows
        kind = type(value)
        is_container = issubclass(kind, (list, tuple, dict))
        if id(value) in seen or not (is_container or not name or _is_users(kind)):
            continue
        seen.add(id(value))
        yield name, value
        if depth < DEPTH and len(waiting) < MOST_OBJECTS:
            waiting += [(*part, depth + 1) for part in _parts(name, value)]


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    """The parts of a container, and the attributes of an object, by name."""
    if issubclass(type(value), dict):
        items = [] if len(value) > MOST_PARTS else [*dict.items(value)]
        return [(f"{name}[{key!r}]" if isinstance(key, (str, int)) else f"{name}[...]", part) for key, part in items]
    if issubclass(type(value), (list, tuple)):
        return [] if len(value) > MOST_PARTS else [(f"{name}[{n}]", part) for n, part in enumerate(value)]
    is_module = issubclass(type(value), nn.Module)  # its tensors are looked at elsewhere
    attributes: dict[str, Any] = {}
    with suppress(Exception):  # of an object that stands for another, which is not there
        attributes = value.__dict__
    return [(f"{name}.{key}", part) for key, part in [*attributes.items()] if not (is_module and key[:1] == "_")]


def _is_users(kind: type) -> bool:
    """Whether a class is the user's, or of an installed package other than torch."""
    return not issubclass(kind, ModuleType) and _is_users_file(str(kind.__module__))


@cache
def _is_users_file(module: str) -> bool:
    if module == "__main__":
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and owner(file) in (USER, LIBRARY)


def _tensors(container: Any, most: int) -> list[Tensor]:
    """The plain tensors in it and in containers in it; none if there are more than `most`."""
    parts = parts_of(container)
    found: list[Tensor] = []
    for part in parts if len([*parts]) <= MOST_PARTS + most else ():
        found += filter(is_plain, parts_of(part) or [part])
        if len(found) > 4 * most:
            return []
    return found


def _shapes(tensors: Iterable[Tensor]) -> Shapes:
    return sorted((tuple(one.shape), one.is_floating_point()) for one in tensors)


def _shapes_of(model: nn.Module) -> Iterator[Shapes]:
    """Of what an average of the model may have: all parameters, the trainable ones, the state_dict, its floats."""
    parameters = [*model.parameters()]
    yield _shapes(parameters)
    yield _shapes(p for p in parameters if p.requires_grad)
    state = [p for _, p in model.named_parameters(remove_duplicate=False)]
    for module in model.modules():
        hidden: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        state += [b for name, b in module.named_buffers(recurse=False) if name not in hidden]
    yield _shapes(state)
    yield _shapes(one for one in state if one.is_floating_point())
