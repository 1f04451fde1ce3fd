"""Objects that a loop keeps beside its models, and that checkpoints save: averages of a model, say."""

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from paceline.checkpoint.state import Held, Source
from paceline.errors import UsageError
from paceline.sessions.assumptions import STATE
from paceline.train.numbers import as_json, from_json

TENSOR = "tensor of the state"


class Registered:
    """What `Session.register` was given. To a checkpoint it is one more part of the training's state."""

    def __init__(self, saved: Mapping[str, Any]) -> None:
        """`saved`: what `numbers` gave, of the checkpoint that the run resumes from."""
        self._saved = dict(saved)
        self._seen: dict[int, tuple[Any, Any]] = {}  # modules that are not saved, and how their tensors were
        self._looks = 0
        self.things: dict[str, Any] = {}
        self.ignored: list[Any] = []

    def add(self, name: str, thing: Any, *, saved: bool) -> None:
        """Raises UsageError for a name that is taken, and for an object without a state."""
        if name in self.things:
            raise UsageError(f"s.register({name!r}, ...): the name is taken already")
        if not saved:
            self.ignored.append(thing)
            return
        missing = [of for of in ("state_dict", "load_state_dict") if not callable(getattr(thing, of, None))]
        if missing:
            raise UsageError(f"s.register({name!r}, ...): a {type(thing).__name__} has no method {missing[0]}")
        _split(thing.state_dict(), name)  # raises for what cannot be saved
        self.things[name] = thing

    def load(self, name: str, source: Source, where: str) -> None:
        """Restore one object.

        Raises:
            UsageError: if the checkpoint does not have it.
        """
        if name not in self._saved:
            known = ", ".join(self._saved) or "none"
            raise UsageError(f"s.register({name!r}, ...): {where} does not have it. It has: {known}")
        self.things[name].load_state_dict(_joined(from_json(self._saved[name]), source))

    def check_all_there(self) -> None:
        """Raise UsageError if the checkpoint has an object that the script has not registered."""
        if lost := [name for name in self._saved if name not in self.things]:
            raise UsageError(
                f"the checkpoint has the state of {', '.join(lost)}, which the script has not registered: it would be "
                f"lost. Call s.register({lost[0]!r}, ...) before the loop"
            )

    def look_around(self, models: Iterable[nn.Module]) -> None:
        """At the first step, at the first checkpoints and then at fewer and fewer: look for state that would be lost.

        Raises:
            UsageError: if a module that is neither in one of the `models` nor registered has changed in between.
        """
        self._looks += 1
        if self._looks > 4 and self._looks & (self._looks - 1):
            return
        known = [*models, *self.ignored, *self.things.values()]
        own = {id(module) for thing in known if isinstance(thing, nn.Module) for module in thing.modules()}
        for thing in _objects():
            if not _is_module(thing) or id(thing) in own:
                continue
            now = _fingerprint(thing)
            before = self._seen.get(id(thing))
            if now and before is not None and before[0]() is thing and before[1] != now:
                raise STATE.error(f"a module that is not in a prepared model, {type(thing).__name__},")
            if before is None and self._looks > 1 and isinstance(thing, AveragedModel) and int(thing.n_averaged):
                raise STATE.error("an AveragedModel")
            self._seen[id(thing)] = (weakref.ref(thing), now)

    def state(self) -> list[Held]:
        """All its tensors, under names of their own."""
        return [held for name, thing in self.things.items() for held in _split(thing.state_dict(), name)[1]]

    def numbers(self) -> dict[str, Any]:
        """The rest of it, as JSON."""
        return {name: _split(thing.state_dict(), name)[0] for name, thing in self.things.items()}


def _split(state: Any, name: str) -> tuple[Any, list[Held]]:
    """A state as JSON, with names in place of its tensors, and the tensors."""
    held: list[Held] = []

    def without_tensors(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            held.append(Held(path, value.detach()))
            return {TENSOR: path}
        if isinstance(value, Mapping):
            return {key: without_tensors(part, f"{path}/{key}") for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [without_tensors(part, f"{path}/{number}") for number, part in enumerate(value)]
        return value

    return as_json(without_tensors(state, f"registered/{name}"), f"registered object {name!r}"), held


def _joined(value: Any, source: Source) -> Any:
    if isinstance(value, Mapping):
        if TENSOR in value:
            found = source.tensor(value[TENSOR])
            assert found is not None
            return found
        return {key: _joined(part, source) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_joined(part, source) for part in value]
    return value


def _objects() -> list[Any]:
    """All objects of the process that may refer to others, those that are frozen for forks as well."""
    frozen, enabled = gc.get_freeze_count(), gc.isenabled()
    gc.disable()
    try:
        gc.unfreeze()
        return gc.get_objects()
    finally:
        if frozen:
            gc.freeze()
        if enabled:
            gc.enable()


def _is_module(thing: Any) -> bool:
    return issubclass(type(thing), nn.Module) and "_parameters" in vars(thing)


def _fingerprint(module: nn.Module) -> list[Any]:
    """Of a module's own tensors: changes with them, whether they are written to through .data or not."""
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
