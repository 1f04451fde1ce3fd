"""Finds modules, and lists and dictionaries of tensors, in the user's code that change and are not in checkpoints.

A list that the loop creates in each step is not state. A container is state if it is the same object in two searches,
and its tensors have changed in between. A reference keeps it alive between searches, so that its id stays unique.
"""

import dis
import gc
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import isclose
from types import FrameType, GeneratorType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from paceline.checkpoint.shards import checksum
from paceline.errors import UsageError
from paceline.rank.sites import LIBRARY, USER, code_owner
from paceline.sessions.containers import (
    container_elements,
    find_live_instances,
    has_storage_address,
    storage_address,
    storage_addresses,
    tensors_of_models,
)
from paceline.sessions.sharded_tensors import local_shard

MAX_SEARCH_DEPTH = 3  # of nested objects and containers, from a name in the user's code
MOST_PARTS, MOST_OBJECTS = 1000, 20_000  # that are searched: in one container, and in total
ALWAYS_SEARCHED_STEPS = 2
SAME_CHANGE = 1e-6  # more than the rounding of float64
Shapes = list[tuple[tuple[int, ...], bool]]


@dataclass
class _SeenContainer:
    container: Any
    sums: list[int]
    is_created_in_training: bool  # it was created during the training
    is_new: bool = True  # it was found in one search only


class UnsavedStateSearch:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._modules: dict[int, tuple[Any, Any]] = {}  # by id: a weak reference and the fingerprint
        self._containers: dict[int, _SeenContainer] = {}  # that the last search has found
        self._step, self._last_look = 0, -1
        self._searches, self._next_search, self._has_warned = 0, 0.0, False

    def after_step(self) -> bool:
        """Release containers that the loop no longer has. Returns whether to search `again`."""
        self._step += 1
        for key in [key for key, entry in self._containers.items() if sys.getrefcount(entry.container) <= 2]:
            del self._containers[key]
        return self._step <= ALWAYS_SEARCHED_STEPS or any(entry.is_new for entry in self._containers.values())

    def search(
        self, models: list[nn.Module], optimizers: list[Optimizer], known: list[Any], only_known_containers: bool
    ) -> bool:
        """Search at the first step and at checkpoints, in at most 1 % of the time, or check containers `again`.

        Returns whether it has searched. If not, a search would take too much time now, or it has only checked
        containers.
        """
        began = time.perf_counter()
        if not only_known_containers:
            if self._searches > 4 and began < self._next_search:
                return False
            self._searches += 1
            self._search_modules(models, known)
        self._search_containers(models, optimizers, known, only_known_containers)
        spent = time.perf_counter() - began
        self._next_search = (self._next_search if only_known_containers else began + spent) + 100 * spent
        return not only_known_containers

    def _search_modules(self, roots: list[nn.Module], known: list[Any]) -> None:
        objects = [obj for obj in (*roots, *known) if isinstance(obj, nn.Module)]
        known_modules = {id(module) for obj in objects for module in obj.modules()}
        modules = (module for module in find_live_instances(nn.Module) if "_parameters" in vars(module))
        others = [module for module in modules if id(module) not in known_modules]
        for other in others:
            fingerprint, previous = _fingerprint(other), self._modules.get(id(other))
            if previous is not None and previous[0]() is other:
                if fingerprint and previous[1] != fingerprint:
                    raise UsageError(
                        code="state-not-saved",
                        what=f"a module that is not in a prepared model, {_outermost(other, others)},",
                    )
            elif self._searches > 1:
                if isinstance(other, AveragedModel) and int(other.n_averaged):
                    raise UsageError(code="state-not-saved", what="an AveragedModel")
                if any(type(other) is type(root) and other is not root for root in roots) and not self._has_warned:
                    self._has_warned = True
                    self._say(
                        f"the loop created a {type(other).__name__} in addition to the prepared one: no checkpoint has "
                        "it, and it is missing after a resume"
                    )
            self._modules[id(other)] = (weakref.ref(other), fingerprint)

    def _search_containers(
        self, models: list[nn.Module], optimizers: list[Optimizer], known: list[Any], again: bool
    ) -> None:
        """Search the user's variables. `again`, after the first step: only the containers of the last search."""
        if self._last_look == self._step:
            return
        self._last_look = self._step
        gradients = (p.grad for model in models for p in model.parameters())
        known_storages = storage_addresses([*tensors_of_models(models), *gradients])
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        known_storages |= storage_addresses(value for state in states for value in state.values())
        shapes_of_models = (shapes for model in models for shapes in _shapes_of(model))
        candidates = [shapes for shapes in shapes_of_models if len(shapes) > 1 or any(shapes[0][0])]
        skip = {id(value) for _, value in _walk([("", root) for root in (*optimizers, *known)])}
        containers: dict[int, _SeenContainer] = {}
        for name, value in _walk(_names(sys._getframe()), skip):  # pyright: ignore[reportPrivateUsage]
            previous = self._containers.get(id(value))
            if previous is None and again and self._step > 1:
                continue
            tensors = _tensors(value, max(map(len, candidates), default=0))
            tensors = [tensor for tensor in tensors if storage_address(tensor) not in known_storages]
            if not tensors or _shapes(tensors) not in candidates:
                continue
            sums = [int(checksum(local_shard(tensor))) for tensor in tensors]
            kind = type(value).__name__
            if previous is None:
                containers[id(value)] = _SeenContainer(value, sums, is_created_in_training=self._step > 0)
                continue
            if previous.sums != sums:
                raise UsageError(code="state-not-saved", what=f"a {kind} of tensors, {name},")
            if previous.is_new and previous.is_created_in_training:
                self._say(
                    f"the loop created a {kind} of tensors, {name}: no checkpoint has it, and it is missing after a "
                    "resume. To save it, put it into a dict that is registered with s.register before the loop"
                )
            previous.is_new, containers[id(value)] = False, previous
        self._containers = containers


def find_user_numbers(frame: FrameType | None) -> dict[str, float]:
    """The numbers in the user's variables and objects other than modules, and the steps of schedulers, by name."""
    roots = [*_names(frame)]
    objects = [(name, value) for name, value in _walk(roots) if not isinstance(value, nn.Module)]
    parts = [part for name, value in objects for part in _parts(name, value)]
    numbers: dict[str, float] = {}
    for name, value in (*roots, *parts):
        if isinstance(value, LRScheduler):
            numbers[f"{name}.last_epoch"] = value.last_epoch
        elif isinstance(value, AveragedModel):
            numbers[f"{name}.n_averaged"] = int(value.n_averaged)
        elif type(value) in (int, float) or (
            isinstance(value, Tensor) and has_storage_address(value) and value.numel() == 1
        ):
            numbers[name] = value if not isinstance(value, Tensor) else value.item()
    return numbers


def find_counted_numbers(before: dict[str, float], once: dict[str, float], twice: dict[str, float]) -> list[str]:
    """The numbers that a body, computed twice on the same samples, changes by the same amount or factor each time.

    So it counts or adds up. A number that it sets does not change in the second computation: the last loss, a learning
    rate. Times change by different amounts.
    """
    names = before.keys() & once.keys() & twice.keys()
    return sorted(name for name in names if _are_in_progression(before[name], once[name], twice[name]))


def _are_in_progression(a: float, b: float, c: float) -> bool:
    if a == b or b == c:
        return False
    is_sum = isclose(b - a, c - b, rel_tol=SAME_CHANGE)
    return is_sum or (a != 0 and b != 0 and isclose((b - a) / a, (c - b) / b, rel_tol=SAME_CHANGE))


def find_wrapping_iterators(frame: FrameType) -> list[str]:
    """The iterators of Python through which the user iterates over a running generator: enumerate, zip, islice, ..."""
    frames, outer_frame = {frame}, frame.f_back
    while outer_frame is not None and code_owner(outer_frame.f_code.co_filename) is not USER:
        frames.add(outer_frame)  # a generator such as tqdm's: while it runs, it is no referrer
        outer_frame = outer_frame.f_back
    objects: list[Any] = gc.get_objects()
    inner: list[Any] = [value for value in objects if type(value) is GeneratorType and value.gi_frame in frames]
    found, seen = list[str](), {id(value) for value in inner}
    while inner:
        outer: list[Any] = gc.get_referrers(*inner)
        # zip has a tuple of its iterators
        inner = [value for value in outer if isinstance(value, (Iterator, tuple)) and id(value) not in seen]
        seen |= {id(value) for value in inner}
        iterators = [value for value in inner if isinstance(value, Iterator)]
        found += [type(value).__name__ for value in iterators if type(value).__module__ in ("builtins", "itertools")]
    return [name for name in found if name != GeneratorType.__name__]


def find_next_call(frame: FrameType) -> set[str]:
    """{"next"} if the user resumes a running generator by a call, also through other generators and iterators."""
    caller = frame.f_back
    while caller is not None:
        code, at = caller.f_code, caller.f_lasti
        while dis.opname[code.co_code[at]] == "CACHE":  # belongs to the instruction before it
            at -= 2
        is_iterator = code.co_name == "__next__"
        if "CALL" in dis.opname[code.co_code[at]] and not is_iterator:
            return {"next"}
        if not (is_iterator or code.co_flags & inspect.CO_GENERATOR):
            break
        caller = caller.f_back
    return set()


def _names(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    while frame is not None:
        if code_owner(frame.f_code.co_filename) is USER:
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
        if depth < MAX_SEARCH_DEPTH and len(queue) < MOST_OBJECTS:
            queue += [(*part, depth + 1) for part in _parts(name, value)]


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    if issubclass(type(value), dict):
        items = [] if len(value) > MOST_PARTS else [*dict.items(value)]
        return [(f"{name}[{key!r}]" if isinstance(key, (str, int)) else f"{name}[...]", part) for key, part in items]
    if issubclass(type(value), (list, tuple)):
        return [] if len(value) > MOST_PARTS else [(f"{name}[{n}]", part) for n, part in enumerate(value)]
    is_module = issubclass(type(value), nn.Module)  # `_search_modules` checks its tensors
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
    return file is not None and code_owner(file) in (USER, LIBRARY)


def _tensors(container: Any, limit: int) -> list[Tensor]:
    """The plain tensors in a container and in the containers inside it; empty if there are many more than `limit`."""
    parts = container_elements(container)
    tensors: list[Tensor] = []
    for part in parts if len([*parts]) <= MOST_PARTS + limit else ():
        tensors += filter(has_storage_address, container_elements(part) or [part])
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


def _outermost(module: nn.Module, others: Iterable[nn.Module]) -> str:
    containing = [other for other in others if any(part is module for part in other.modules())]
    return type(max(containing, key=lambda other: sum(1 for _ in other.modules()), default=module)).__name__


def _fingerprint(module: nn.Module) -> list[Any]:
    """A fingerprint of the module's direct tensors, which changes with their values, also if written through .data."""
    tensors = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]  # pyright: ignore
    return [
        (id(t), t._version, float(t.detach().reshape(-1)[0]))  # pyright: ignore[reportPrivateUsage]
        for t in tensors
        if t.numel()
        and not t.is_complex()
        and not t.is_meta
        and hasattr(t, "_version")
        and type(t).__name__ != "DTensor"
    ]
