"""The order of samples that a user's DataLoader gives: drawn batch by batch, the same on all ranks and after a resume.

Each rank draws the whole order itself, from the random streams and the sampler state of rank 0. A hash of what was
drawn travels with each step, so ranks that draw other samples are found before the first wrong update. The state with
which an epoch began is checkpointed. After a resume the epoch is drawn again up to the batch at which it stopped, and
its hash is compared.
"""

import base64
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from paceline.data.plan import BatchPlan
from paceline.errors import UsageError
from paceline.train.numbers import as_json, from_json, restore_type

MOST_ITEMS = 10_000  # of a list in a sampler's state
HASH_BITS = 48  # a float64 holds it exactly
DEPTH = 4  # of objects in a sampler whose state is kept


class SampleOrder:
    """The batches of one epoch, drawn when they are asked for."""

    def __init__(self, loader: DataLoader[Any], short: tuple[int, int] | None = None) -> None:
        """Begin an epoch as DataLoader itself does, from the random streams as they are.

        `short`: the epoch ends after so many batches and so many samples of the next one.
        """
        assert loader.batch_sampler is not None  # see `check_taken`
        self._batches: Iterator[Any] = iter(loader.batch_sampler)
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # DataLoader's seed of its processes
        self._drawn: dict[int, tuple[Tensor, int]] = {}
        self._next = self._hash = 0
        self._is_over = False
        self._whole, self._rest = short or (None, 0)

    def has(self, batch: int) -> bool:
        """Whether the epoch has this batch; draws up to it."""
        while self._next <= batch and not self._is_over:
            try:
                indices = next(self._batches)
            except StopIteration:
                self._is_over = True
                break
            found = _indices(indices)
            if self._next == self._whole:
                found, self._is_over = found[: self._rest], True
                if not len(found):
                    break
            self._hash = hash((self._hash, *found.tolist())) % 2**HASH_BITS
            self._drawn[self._next] = (found, self._hash)
            self._next += 1
        return batch < self._next

    @property
    def drawn(self) -> int:
        """How many batches the sampler was asked for so far: one more than there are, once it has ended."""
        return self._next + self._is_over

    def batch(self, batch: int) -> Tensor:
        """(n,) int64: its samples."""
        if not self.has(batch):
            raise IndexError(f"the epoch has {self._next} batches, and no number {batch}")
        return self._drawn[batch][0]

    def hash_at(self, batch: int) -> int:
        """Of all samples up to this batch, and of their order; 0 before the first."""
        if batch < 0:
            return 0
        return self._drawn[batch][1] if self.has(batch) else self._hash

    def forget(self, before: int) -> None:
        """Let go of batches that are over."""
        for number in [number for number in self._drawn if number < before]:
            del self._drawn[number]


def _indices(batch: Any) -> Tensor:
    try:
        found = torch.as_tensor(batch)
        if found.ndim == 1 and not found.is_floating_point() and not found.is_complex():
            return found.to(torch.int64)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise UsageError(code="sampler-gives-keys", value=str(batch)[:80])


@dataclass(frozen=True)
class DrawnPlan(BatchPlan):
    """The batches of one epoch in an order of the user's own, dealt to virtual ranks as every plan does."""

    own_order = True
    order: SampleOrder | None = None
    steps: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """How many batches it should have, as the DataLoader says; 1 if it does not say so."""
        return self.steps

    def global_indices(self, epoch: int, step: int) -> Tensor:
        """(n,) int64: the samples of batch `step`, in whichever epoch this order was drawn for."""
        del epoch
        assert self.order is not None
        return self.order.batch(step)


def steps_of(loader: DataLoader[Any]) -> int:
    """The batches that a DataLoader says an epoch has; 0 if it does not say."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return 0


def is_torchs(loader: DataLoader[Any]) -> bool:
    """Whether torch's own classes draw its order: then its length is right, and drawing ahead is harmless."""
    own = type(loader.sampler).__module__.startswith("torch.utils.data")
    return own and type(loader.batch_sampler) is BatchSampler


def keeps_order(loader: DataLoader[Any]) -> bool:
    """Whether it gives its samples as they lie."""
    return type(loader.sampler) is SequentialSampler and is_torchs(loader)


def covers_all(loader: DataLoader[Any]) -> bool:
    """Whether an epoch has each of its samples once, as far as its kind of sampler tells."""
    sampler = loader.sampler
    once = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset)  # pyright: ignore
    return keeps_order(loader) or (once and is_torchs(loader))


def check_not_sharded(loader: DataLoader[Any]) -> None:
    """Raise UsageError for a sampler that gives each rank a part."""
    for sampler in (loader.sampler, loader.batch_sampler):
        replicas = getattr(sampler, "num_replicas", None)
        if isinstance(replicas, int) and replicas > 1 and hasattr(sampler, "rank"):
            raise UsageError(code="sampler-of-shards", name=type(sampler).__name__)


class SamplerState:
    """What a DataLoader draws its order from: generators, and attributes of its samplers that change."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._first = self._attributes()

    def now(self) -> dict[str, Any]:
        """The state as JSON: of the random streams that are its own, and of attributes that have changed."""
        found: dict[str, Any] = {name: source_state(one) for name, one in self._sources().items()}
        changed = {name: value for name, value in self._attributes().items() if value != self._first.get(name)}
        owners = {name: owner for name, owner in self._owners() if _has_state_dict(owner)}
        states = {name: _without_tensors(owner.state_dict()) for name, owner in owners.items()}
        return {"sources": found, "attributes": {**changed, **states}}

    def put_back_sources(self, state: Mapping[str, Any]) -> None:
        """Let generators continue from where `now` has found them on rank 0."""
        sources = self._sources()
        for name, value in state.get("sources", {}).items():
            if name in sources:
                put_source(sources[name], value)

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Take over what `now` gave, after a resume."""
        self.put_back_sources(state)
        owners = dict(self._owners())
        for name, owner in owners.items():
            saved = state.get("attributes", {}).get(name)
            if saved is not None and _has_state_dict(owner) and _without_tensors(owner.state_dict()) != saved:
                owner.load_state_dict(_with_tensors(saved))
        for full, value in state.get("attributes", {}).items():
            owner, _, attribute = full.rpartition(".")
            if owner in owners and hasattr(owners[owner], attribute):  # the first value may be that of the class
                _put_attribute(owners[owner], attribute, value)

    def _owners(self) -> Iterator[tuple[str, Any]]:
        """The samplers, and what they consist of, by name."""
        seen: set[int] = set()
        waiting: list[tuple[str, Any, int]] = [
            ("batch_sampler", self._loader.batch_sampler, 0), ("sampler", self._loader.sampler, 0),
        ]  # fmt: skip
        while waiting:
            name, owner, depth = waiting.pop(0)
            if id(owner) in seen or not hasattr(owner, "__dict__"):
                continue
            seen.add(id(owner))
            yield name, owner
            if depth < DEPTH and not _has_state_dict(owner):
                for key, value in vars(owner).items():
                    kind = type(value).__module__.partition(".")[0]
                    if isinstance(value, Sampler) or (
                        kind not in ("torch", "numpy", "builtins", "paceline") and self._is_part(value)
                    ):
                        waiting.append((f"{name}.{key}", value, depth + 1))

    def _is_part(self, value: Any) -> bool:
        """Whether an object belongs to a sampler alone: no dataset, no function, no module."""
        data = value is self._loader.dataset or isinstance(value, (torch.utils.data.Dataset, torch.nn.Module, type))
        return not data and not callable(value) and hasattr(value, "__dict__") and not hasattr(value, "__getitem__")

    def _sources(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._loader.generator is not None:
            found["generator"] = self._loader.generator
        for name, owner in self._owners():
            for key, value in vars(owner).items() if not _has_state_dict(owner) else ():
                if isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
                    found[f"{name}.{key}"] = value
        return found

    def _attributes(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, owner in self._owners():
            if _has_state_dict(owner):
                continue
            for key, value in vars(owner).items():
                if (text := _attribute(value)) is not None:
                    found[f"{name}.{key}"] = text
        return found


def _attribute(value: Any) -> Any:
    """An attribute as JSON: numbers, words, lists and tables of them, tensors and arrays; None for anything else."""
    if isinstance(value, Tensor):
        return {"array": value.detach().tolist()} if value.numel() <= MOST_ITEMS and not value.is_complex() else None
    if isinstance(value, np.ndarray):
        return {"array": value.tolist()} if value.size <= MOST_ITEMS and value.dtype.kind in "biuf" else None
    if isinstance(value, (list, tuple, dict)) and len(value) > MOST_ITEMS:
        return None
    try:
        return {"value": as_json(value)}
    except UsageError:
        return None


def _put_attribute(owner: Any, name: str, text: Any) -> None:
    """Give it its value again; a container keeps its identity, as the loop may hold it as well."""
    before = getattr(owner, name)
    if "array" in text:
        if isinstance(before, Tensor) and before.shape == torch.as_tensor(text["array"]).shape:
            before.copy_(torch.as_tensor(text["array"], dtype=before.dtype))
        elif isinstance(before, np.ndarray) and before.shape == np.shape(text["array"]):
            before[...] = text["array"]
        else:
            kind: Any = torch.as_tensor if isinstance(before, Tensor) else np.asarray
            setattr(owner, name, kind(text["array"], dtype=before.dtype))
        return
    value = from_json(text["value"])
    if isinstance(before, list) and isinstance(value, list):
        before[:] = value
    elif type(before) is dict and isinstance(value, dict):
        before.clear()
        before.update(value)  # pyright: ignore[reportUnknownArgumentType]
    else:
        setattr(owner, name, restore_type(before, value))


def _has_state_dict(owner: Any) -> bool:
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


def source_state(source: Any) -> Any:
    """Where a random generator stands, as JSON."""
    if isinstance(source, torch.Generator):
        return text_of(source.get_state())
    if isinstance(source, random.Random):
        return json.dumps(source.getstate())
    if isinstance(source, np.random.Generator):
        return json.dumps(source.bit_generator.state, default=_array)
    if isinstance(source, np.random.RandomState):
        return json.dumps(source.get_state(legacy=False), default=_array)
    raise AssertionError(source)


def _without_tensors(value: Any) -> Any:
    """A sampler's state as JSON."""
    if isinstance(value, Tensor):
        return {"tensor": str(value.dtype).removeprefix("torch."), "values": value.detach().tolist()}
    if isinstance(value, Mapping):
        return {"table": [[as_json(key), _without_tensors(part)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [_without_tensors(part) for part in value]}
    return {"value": as_json(value, "sampler")}


def _with_tensors(found: Any) -> Any:
    """What `_without_tensors` was given."""
    if "tensor" in found:
        return torch.tensor(found["values"], dtype=getattr(torch, found["tensor"]))
    if "table" in found:
        return {from_json(key): _with_tensors(part) for key, part in found["table"]}
    return [_with_tensors(part) for part in found["list"]] if "list" in found else from_json(found["value"])


def put_source(source: Any, value: Any) -> None:
    """Let it continue from where `source_state` has found it."""
    if isinstance(source, torch.Generator):
        source.set_state(tensor_of(value))
    elif isinstance(source, random.Random):
        version, words, gauss = json.loads(value)
        source.setstate((version, tuple(words), gauss))
    elif isinstance(source, np.random.Generator):
        source.bit_generator.state = json.loads(value)
    elif isinstance(source, np.random.RandomState):
        source.set_state(json.loads(value))


def _array(value: Any) -> Any:
    return value.tolist()


def global_streams() -> dict[str, str]:
    """Where the random streams of the process stand, as JSON."""
    numpy_state = json.dumps(np.random.get_state(legacy=False), default=_array)
    return {"torch": text_of(torch.get_rng_state()), "python": json.dumps(random.getstate()), "numpy": numpy_state}


def put_global_streams(found: Mapping[str, str]) -> None:
    """Let them continue from where `global_streams` has found them."""
    torch.set_rng_state(tensor_of(found["torch"]))
    if "python" in found:
        version, words, gauss = json.loads(found["python"])
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(json.loads(found["numpy"]))


def text_of(state: Tensor) -> str:
    """A generator's state."""
    return base64.b85encode(state.numpy().tobytes()).decode()


def tensor_of(text: str) -> Tensor:
    """What `text_of` was given."""
    return torch.frombuffer(bytearray(base64.b85decode(text)), dtype=torch.uint8)


def regrouped(batches: Iterator[Tensor], least: int) -> Iterator[Tensor]:
    """`batches` of at least so many samples: a smaller one is joined with the next, or the last with the one before."""
    held: Tensor | None = None
    waiting: Tensor | None = None
    for batch in batches:
        waiting = batch if waiting is None else torch.cat([waiting, batch])
        if len(waiting) >= least:
            if held is not None:
                yield held
            held, waiting = waiting, None
    if waiting is not None:
        held = waiting if held is None else torch.cat([held, waiting])
    if held is not None:
        yield held
