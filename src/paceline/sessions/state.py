"""The state of a session in checkpoints: models, objects that the loop registers, loaders and values."""

import gc
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint.shards import make_shard_layout
from paceline.checkpoint.state import StateSource, TensorShard
from paceline.collectives.control import all_gather_object, error_on_one_rank, raise_on_all_ranks
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.sessions.containers import (
    GeneratorStateAdapter,
    RegisteredContainer,
    find_live_instances,
    storage_addresses,
    tensors_of_models,
)
from paceline.sessions.lifecycle import SessionRun
from paceline.sessions.loader import Loader
from paceline.sessions.order import RANDOM_GENERATOR_TYPES
from paceline.sessions.prepared import PreparedModel
from paceline.sessions.session_step import NotePrinter
from paceline.sessions.sharded_tensors import is_dtensor, local_shard
from paceline.train.consistency import check_replicas
from paceline.train.json_values import as_json, from_json

if TYPE_CHECKING:
    from paceline.sessions.unsaved import UnsavedStateSearch

TENSOR_KEY = "tensor of the state"


class SessionState:
    """The objects whose state a checkpoint contains. A resumed run restores each one when the loop creates it."""

    def __init__(self, run: SessionRun) -> None:
        self._world, self._origin, saved = run.world, run.progress.origin, run.loop_state
        self.notes, self.saves = NotePrinter(run.progress.say), run.progress.place is not None
        """The notes for the user; whether the run writes checkpoints."""
        self.values: dict[str, Any] = dict(saved.get("saved", {}))  # `Session.saved`
        self.models: list[PreparedModel] = []  # the prepared models, in the order of `Session.prepare`
        self.saved_models: list[dict[str, Any]] = list(saved.get("parts", []))
        """The values of each model in the checkpoint, except tensors."""
        self._registered: dict[str, Any] = {}
        self._not_saved: list[Any] = []  # registered with saved=False
        self._saved_objects: dict[str, Any] = dict(saved.get("registered", {}))
        self._loaders: list[Loader] = []  # created before the first step, in order
        self._saved_loaders: dict[str, dict[str, Any]] = dict(saved.get("loaders", {}))  # states of samplers by number
        self._saved_accumulation: dict[str, int] = dict(saved.get("accumulation", {}))  # of loaders, by number
        self._unsaved: UnsavedStateSearch | None = None  # the search for state that no checkpoint contains
        self.is_damaged = False
        """Whether the state must not be saved, because an update was wrong or a part of the state is missing."""

    def find_model(self, module: nn.Module | None) -> PreparedModel | None:
        return next((part for part in self.models if module in (part.replica.model, part.replica.module)), None)

    def add_model(self, part: PreparedModel) -> None:
        if self._origin is not None:
            with raise_on_all_ranks(self._world):
                if part.number >= len(self.saved_models):
                    saved = len(self.saved_models)
                    raise UsageError(code="model-too-many", where=self._origin.location_text, saved=saved)
                part.load(self._origin.source)
                for number in range(len(part.optimizers)):
                    part.load_json_state(self.saved_models[part.number], number)
        self.models.append(part)

    def restore_added_optimizers(self, part: PreparedModel, count: int) -> None:
        if self._origin is not None:
            with raise_on_all_ranks(self._world):
                for number, prepared in [*enumerate(part.optimizers)][-count:]:
                    part.load_pending_optimizer_state(prepared.optimizer, prepared.parameters)
                    part.load_json_state(self.saved_models[part.number], number)

    def register(self, name: str, thing: Any, *, saved: bool) -> None:
        if not saved:
            if name in self._registered:
                raise UsageError(code="register-name-taken", name=name)
            self._not_saved.append(thing)
            return
        with raise_on_all_ranks(self._world):
            self._registered[name] = registered = self._with_state(name, thing)
            if self._origin is not None:
                if name not in self._saved_objects:
                    where, known = self._origin.location_text, ", ".join(self._saved_objects) or "none"
                    raise UsageError(code="register-not-in-checkpoint", name=name, where=where, known=known)
                registered.load_state_dict(_joined(from_json(self._saved_objects[name]), self._origin.source))

    def _with_state(self, name: str, thing: Any) -> Any:
        if name in self._registered:
            raise UsageError(code="register-name-taken", name=name)
        if isinstance(thing, LRScheduler):
            raise UsageError(code="register-scheduler", name=name)
        methods = ("state_dict", "load_state_dict")
        missing = [method for method in methods if not callable(getattr(thing, method, None))]
        if missing and isinstance(thing, RANDOM_GENERATOR_TYPES):
            thing = GeneratorStateAdapter(thing)
        elif missing and isinstance(thing, (dict, list)):
            model_storages = storage_addresses(tensors_of_models(part.replica.model for part in self.models))
            thing = RegisteredContainer(thing, name, self._world.device, model_storages)  # pyright: ignore[reportUnknownArgumentType]
        elif missing:
            raise UsageError(code="register-no-state", name=name, kind=type(thing).__name__, method=missing[0])
        _split(thing.state_dict(), name)  # raises an error if the state cannot be saved
        return thing

    def add_loader(self, loader: Loader) -> None:
        if (state := self._saved_loaders.get(str(len(self._loaders)))) is not None:
            loader.restore_sampler(state)
        if loader.is_unsplit and (saved := self._saved_accumulation.get(str(len(self._loaders)))) is not None:
            loader.set_accumulation(saved)
        self._loaders.append(loader)

    def check_saveable(self) -> None:
        if lost := [name for name in self._saved_objects if name not in self._registered]:
            raise UsageError(code="register-lost", names=", ".join(lost), first=lost[0])
        for part in self.models:
            part.check_all_optimizers_prepared()
            part.json_state()
        if self.saves:
            from paceline.sessions.unsaved import UnsavedStateSearch

            self._unsaved = UnsavedStateSearch(self.notes.once)
            self.search_unsaved_state()
            self._check_schedulers()
            for part in self.models:
                make_shard_layout(part.state())

    def _check_schedulers(self) -> None:
        optimizers, known_ids = [optimizer for part in self.models for optimizer in part.optimizers], set[int]()
        queue = [*(part.scheduler for part in optimizers), *self._registered.values(), *self._not_saved]
        while queue:
            obj = queue.pop()
            known_ids.add(id(obj))
            queue += getattr(obj, "_schedulers", [])  # in a SequentialLR or ChainedScheduler
        prepared = {id(part.optimizer) for part in optimizers}

        def has_unknown() -> bool:
            schedulers = (scheduler for scheduler in find_live_instances(LRScheduler) if id(scheduler) not in known_ids)
            return any(id(vars(scheduler).get("optimizer")) in prepared for scheduler in schedulers)

        if has_unknown() and (gc.collect() or True) and has_unknown():  # the first may be garbage
            raise UsageError(code="scheduler-not-prepared")

    def must_search_again(self) -> bool:
        """After a step: release containers that the loop no longer has, and return whether to search the others."""
        return self._unsaved is not None and self._unsaved.after_step()

    def search_unsaved_state(self, *, only_known_containers: bool = False) -> None:
        """Search for state that would be lost. `only_known_containers`: only in the containers of the last search."""
        if self._unsaved is None:
            return
        models = [part.replica.model for part in self.models]
        optimizers = [prepared.optimizer for part in self.models for prepared in part.optimizers]
        try:
            is_done = self._unsaved.search(models, optimizers, self._known(), only_known_containers)
            for name, obj in self._registered.items() if is_done else ():
                if isinstance(obj, RegisteredContainer) and obj.is_unreferenced:
                    raise UsageError(code="registered-replaced", name=name, kind=type(obj.thing).__name__)
        except UsageError:
            self.is_damaged = True
            raise

    def _known(self) -> list[Any]:
        adapters = (RegisteredContainer, GeneratorStateAdapter)
        return self._not_saved + [obj.thing if isinstance(obj, adapters) else obj for obj in self._registered.values()]

    def compare_replicas(self, step: int) -> None:
        if self._world.size > 1 and self.models and step and self.models[0].replica.local_step_node is None:
            shards = [shard for part in self.models for shard in part.state()]
            check_replicas(shards, self._world, step, [part.replica.optimizer for part in self.models])

    def registered_tensors(self) -> list[TensorShard]:
        return [shard for name, obj in self._registered.items() for shard in _split(obj.state_dict(), name)[1]]

    def json_state(self, current: Loader | None, world: World | None) -> dict[str, Any]:
        """The state without tensors, as JSON. `current`: the loader of the current loop, whose position is not in it.

        With a `world` it is a collective. Without, values that cannot be saved are omitted.
        """
        parts, saved = (
            [part.json_state() for part in self.models],
            copy_json_values(self.values, strict=world is not None),
        )
        states = {name: _split(obj.state_dict(), name)[0] for name, obj in self._registered.items()}
        if world is not None and states:
            by_rank = all_gather_object(states, world)
            if differing := [name for name in states if any(other[name] != states[name] for other in by_rank)]:
                raise error_on_one_rank(UsageError(code="registered-differs", name=differing[0]), world)
        samplers = {str(n): loader.sampler_state for n, loader in enumerate(self._loaders) if loader is not current}
        loaders = {number: state for number, state in samplers.items() if state is not None}
        accumulations = {str(n): loader.found_accumulation for n, loader in enumerate(self._loaders)}
        accumulation = {number: value for number, value in accumulations.items() if value is not None}
        return {
            "parts": parts, "saved": saved, "registered": states, "loaders": loaders, "accumulation": accumulation
        }  # fmt: skip


def _split(state: Any, name: str) -> tuple[Any, list[TensorShard]]:
    """(the state as JSON, with names instead of tensors; the tensors)."""
    shards: list[TensorShard] = []

    def without_tensors(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            shards.extend(_held(path, value.detach()))
            return {TENSOR_KEY: path}
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


def _joined(value: Any, source: StateSource) -> Any:
    if isinstance(value, Mapping):
        if TENSOR_KEY in value:
            tensor = source.tensor(value[TENSOR_KEY])
            assert tensor is not None
            return tensor
        return {key: _joined(part, source) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_joined(part, source) for part in value]
    return value


def copy_json_values(saved: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    wrong = [name for name, value in saved.items() if not _is_json({name: value})]
    if wrong and strict:
        raise UsageError(code="saved-not-plain", name=wrong[0], kind=type(saved[wrong[0]]).__name__)
    return deepcopy({name: value for name, value in saved.items() if name not in wrong})


def _is_json(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(part) for key, part in value.items())  # pyright: ignore
    if isinstance(value, list):
        return all(_is_json(part) for part in value)  # pyright: ignore
    return value is None or isinstance(value, (bool, int, str))
