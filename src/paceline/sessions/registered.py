"""Objects besides models that a loop registers to be saved in checkpoints, such as averages of a model."""

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from paceline.checkpoint.state import Source, TensorShard
from paceline.collectives.control import all_gather_object, report_on_one_rank
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.sessions.assumptions import STATE
from paceline.sessions.containers import GENERATORS, Generator, TensorContainer, storages, tensors_of
from paceline.sessions.prepared import PreparedOptimizer
from paceline.sessions.sharded_tensors import is_dtensor, local_shard
from paceline.sessions.unsaved import UnsavedContainers
from paceline.train.numbers import as_json, from_json

TENSOR = "tensor of the state"


class RegisteredObjects:
    """The objects of `Session.register`. In a checkpoint they are a part of the training state."""

    def __init__(self, saved: Mapping[str, Any]) -> None:
        """`saved`: the result of `numbers` in the checkpoint from which the run resumes."""
        self._saved = dict(saved)
        self._seen: dict[int, tuple[Any, Any]] = {}  # unsaved modules and their fingerprints
        self._looks, self._next_look, self._has_warned = 0, 0.0, False
        self._containers = UnsavedContainers()
        self.things: dict[str, Any] = {}
        self.ignored: list[Any] = []

    def add(self, name: str, thing: Any, models: Iterable[nn.Module], device: torch.device, *, saved: bool) -> None:
        """Register an object. `models`: the prepared ones. `device`: for tensors that `load` adds to a dict or list.

        Raises:
            UsageError: if the name is already registered, or the object has no state.
        """
        if name in self.things:
            raise UsageError(code="register-name-taken", name=name)
        if not saved:
            self.ignored.append(thing)
            return
        if isinstance(thing, LRScheduler):
            raise UsageError(code="register-scheduler", name=name)
        methods = ("state_dict", "load_state_dict")
        missing = [method for method in methods if not callable(getattr(thing, method, None))]
        if missing and isinstance(thing, GENERATORS):
            thing = Generator(thing)
        elif missing and isinstance(thing, (dict, list)):
            thing = TensorContainer(thing, name, device, storages(tensors_of(models)))  # pyright: ignore[reportUnknownArgumentType]
        elif missing:
            raise UsageError(code="register-no-state", name=name, kind=type(thing).__name__, method=missing[0])
        _split(thing.state_dict(), name)  # raises an error if the state cannot be saved
        self.things[name] = thing

    def load(self, name: str, source: Source, where: str) -> None:
        """Restore one object.

        Raises:
            UsageError: if the checkpoint does not have it.
        """
        if name not in self._saved:
            saved_names = ", ".join(self._saved) or "none"
            raise UsageError(code="register-not-in-checkpoint", name=name, where=where, known=saved_names)
        self.things[name].load_state_dict(_joined(from_json(self._saved[name]), source))

    def check_all_there(self) -> None:
        """Raise UsageError if the checkpoint has an object that the script has not registered."""
        if lost := [name for name in self._saved if name not in self.things]:
            raise UsageError(code="register-lost", names=", ".join(lost), first=lost[0])

    def check_schedulers(self, optimizers: Iterable[PreparedOptimizer]) -> None:
        """Raise UsageError for a learning rate scheduler that no checkpoint has."""
        known_ids: set[int] = set()
        queue = [*(part.scheduler for part in optimizers), *self.things.values(), *self.ignored]
        while queue:
            obj = queue.pop()
            known_ids.add(id(obj))
            queue += getattr(obj, "_schedulers", [])  # in a SequentialLR or ChainedScheduler
        prepared = {id(part.optimizer) for part in optimizers}

        def has_unknown() -> bool:
            schedulers = (scheduler for scheduler in instances(LRScheduler) if id(scheduler) not in known_ids)
            return any(id(vars(scheduler).get("optimizer")) in prepared for scheduler in schedulers)

        if has_unknown() and (gc.collect() or True) and has_unknown():  # the first may be garbage
            raise UsageError(code="scheduler-not-prepared")

    def look_around(
        self, models: Iterable[nn.Module], optimizers: Sequence[Optimizer], say: Callable[[str], None]
    ) -> None:
        """At the first step and at checkpoints, in at most 1 % of the time: search for state that would be lost.

        Raises:
            UsageError: if a module or a container of tensors has changed since the last search, and is neither in one
                of the `models` nor registered; or if the loop has replaced a registered object.
        """
        began = time.perf_counter()
        if self._looks > 4 and began < self._next_look:
            return
        self._looks += 1
        roots = [*models]
        self._look_at_modules(roots, say)
        self._containers.look(roots, optimizers, self._known(), say)
        for name, obj in self.things.items():
            if isinstance(obj, TensorContainer) and obj.is_left:
                raise UsageError(code="registered-replaced", name=name, kind=type(obj.thing).__name__)
        self._next_look = time.perf_counter() + 100 * (time.perf_counter() - began)

    def step_ended(self) -> bool:
        """Whether to `look_again`: after the first steps, and after the step that follows a search."""
        return self._containers.step_ended()

    def look_again(
        self, models: Iterable[nn.Module], optimizers: Sequence[Optimizer], say: Callable[[str], None]
    ) -> None:
        """Check lists and dicts of tensors again.

        Raises:
            UsageError: see `look_around`.
        """
        began = time.perf_counter()
        self._containers.look([*models], optimizers, self._known(), say, again=True)
        self._next_look += 100 * (time.perf_counter() - began)

    def _known(self) -> list[Any]:
        adapters = (TensorContainer, Generator)
        return self.ignored + [obj.thing if isinstance(obj, adapters) else obj for obj in self.things.values()]

    def _look_at_modules(self, roots: Sequence[nn.Module], say: Callable[[str], None]) -> None:
        known_objects = [*roots, *self.ignored, *self.things.values()]
        known_modules = {id(module) for obj in known_objects if isinstance(obj, nn.Module) for module in obj.modules()}
        modules = (module for module in instances(nn.Module) if "_parameters" in vars(module))
        others = [module for module in modules if id(module) not in known_modules]
        for other in others:
            fingerprint, previous = _fingerprint(other), self._seen.get(id(other))
            if previous is not None and previous[0]() is other:
                if fingerprint and previous[1] != fingerprint:
                    raise STATE.error(f"a module that is not in a prepared model, {_outermost(other, others)},")
            elif self._looks > 1:
                if isinstance(other, AveragedModel) and int(other.n_averaged):
                    raise STATE.error("an AveragedModel")
                if any(type(other) is type(root) and other is not root for root in roots) and not self._has_warned:
                    self._has_warned = True
                    say(
                        f"the loop created a {type(other).__name__} in addition to the prepared one: no checkpoint has "
                        "it, and it is missing after a resume"
                    )
            self._seen[id(other)] = (weakref.ref(other), fingerprint)

    def state(self) -> list[TensorShard]:
        """The tensors of all registered objects."""
        return [shard for name, obj in self.things.items() for shard in _split(obj.state_dict(), name)[1]]

    def numbers(self, world: World | None = None) -> dict[str, Any]:
        """The states without tensors, as JSON. With a `world` they are compared over ranks (a collective).

        Raises:
            UsageError: if they differ.
        """
        states = {name: _split(obj.state_dict(), name)[0] for name, obj in self.things.items()}
        if world is not None and states:
            states_by_rank = all_gather_object(states, world)
            if differing := [name for name in states if any(other[name] != states[name] for other in states_by_rank)]:
                raise report_on_one_rank(UsageError(code="registered-differs", name=differing[0]), world)
        return states


def _split(state: Any, name: str) -> tuple[Any, list[TensorShard]]:
    """(the state as JSON, with names instead of tensors; the tensors)."""
    shards: list[TensorShard] = []

    def without_tensors(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            shards.extend(_held(path, value.detach()))
            return {TENSOR: path}
        if isinstance(value, Mapping):
            return {key: without_tensors(part, f"{path}/{quote(str(key), safe='')}") for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [without_tensors(part, f"{path}/{number}") for number, part in enumerate(value)]
        return value

    return as_json(without_tensors(state, f"registered/{quote(name, safe='')}"), f"registered object {name!r}"), shards


def _held(path: str, tensor: Any) -> list[TensorShard]:
    if not is_dtensor(tensor):
        return [TensorShard(path, tensor)]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    shard, start = local_shard(tensor).reshape(-1), offset[0] * tensor.shape[1:].numel()
    return [TensorShard(path, shard, tensor.shape, start, replicated=False)] if shard.numel() else []


def _joined(value: Any, source: Source) -> Any:
    if isinstance(value, Mapping):
        if TENSOR in value:
            tensor = source.tensor(value[TENSOR])
            assert tensor is not None
            return tensor
        return {key: _joined(part, source) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_joined(part, source) for part in value]
    return value


def instances(kind: type) -> list[Any]:
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


def _outermost(module: nn.Module, others: Iterable[nn.Module]) -> str:
    containing = [other for other in others if any(part is module for part in other.modules())]
    return type(max(containing, key=lambda other: sum(1 for _ in other.modules()), default=module)).__name__


def check_no_scaler() -> None:
    """Raise UsageError if the loop has an enabled GradScaler: it needs whole gradients after each backward."""
    if any(scaler.is_enabled() for scaler in instances(torch.amp.GradScaler)):
        raise UsageError(code="grad-scaler")


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
