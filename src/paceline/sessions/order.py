"""The order of samples of a user's DataLoader: equal on all ranks and after a resume.

Each rank draws the whole order, batch by batch, from the random streams and the sampler state of rank 0. Each step
compares a hash of the drawn samples, which detects a different order before the first wrong update. Checkpoints have
the state at the beginning of the epoch. A resume draws the epoch again up to the batch at which it stopped, and
compares the hash.
"""

import base64
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from paceline.data.plan import BatchPlan
from paceline.errors import UsageError
from paceline.train.json_values import as_json, from_json, restore_type

MAX_STATE_ITEMS = 10_000  # of a list in a sampler's state
HASH_BITS = 48  # so that a float64 represents it exactly
MAX_SAMPLER_DEPTH = 4  # of nested objects in a sampler
RANDOM_GENERATOR_TYPES = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
GLOBAL_STREAMS = {"torch": torch.default_generator, "python": random, "numpy": np.random}
_to_list = methodcaller("tolist")  # an array of a generator's state, for JSON


def consume_base_seed(loader: DataLoader[Any]) -> None:
    """Draw the number that DataLoader draws when an epoch begins, so that later draws are those of a plain loop."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


class EpochBatches:
    """The batches of one epoch, drawn on demand."""

    def __init__(
        self, loader: DataLoader[Any], short: tuple[int, int] | None = None, *, draws_seed: bool = True
    ) -> None:
        """Begin an epoch in the same way as DataLoader, from the current random streams.

        `short`: (batches, samples of the next batch) after which the epoch ends.
        `draws_seed`: whether DataLoader draws the seed of its workers.
        """
        self._batches = chain.from_iterable(_batches(loader))
        if draws_seed:
            consume_base_seed(loader)
        self._drawn: dict[int, tuple[Tensor, int]] = {}
        self._next = self._hash = 0
        self._is_over, self.needed = False, 0  # `needed`: the first batch that a reader may still request
        self._whole, self._rest = short or (None, 0)

    def has_batch(self, batch: int) -> bool:
        """Whether the epoch has this batch; draws up to it."""
        while self._next <= batch and not self._is_over:
            if (samples := next(self._batches, None)) is None:
                self._is_over = True
                break
            if self._next == self._whole:
                samples, self._is_over = samples[: self._rest], True
                if not len(samples):
                    break
            self._hash = hash((self._hash, *samples.tolist())) % 2**HASH_BITS
            self._drawn[self._next] = (samples, self._hash)
            self._next += 1
            while (first := next(iter(self._drawn))) < self.needed:
                del self._drawn[first]
        return batch < self._next

    @property
    def num_drawn_batches(self) -> int:
        """Number of batches requested from the sampler so far. At the end it is one more than the epoch has."""
        return self._next + self._is_over

    def batch_indices(self, batch: int) -> Tensor:
        if batch >= self._next and not self.has_batch(batch):
            raise IndexError(f"batch {batch} of an epoch of {self._next} batches")
        return self._drawn[batch][0]

    def hash_at(self, batch: int) -> int:
        """The hash of all samples up to this batch, in order; 0 before the first batch."""
        if batch < 0:
            return 0
        if batch not in self._drawn and not self.has_batch(batch):
            return self._hash
        return self._drawn[batch][1]


def _batches(loader: DataLoader[Any]) -> Iterator[Iterable[Tensor]]:
    """The sample indices of each batch, (n,) int64, in few groups. Nothing is drawn before the first batch."""
    batches: Any = loader.batch_sampler
    if not covers_each_sample_once(loader):
        yield map(_indices, batches)
        return
    # torch draws the whole order for the first batch. Slices of one tensor are faster than a list for each batch.
    sampler: Any = loader.sampler
    samples, count, size = iter(sampler), len(sampler), batches.batch_size
    order = torch.arange(count) if is_sequential(loader) else torch.tensor([*islice(samples, count)], dtype=torch.int64)
    whole = count - count % size
    yield map(order.__getitem__, map(slice, range(0, whole, size), range(size, whole + 1, size)))
    next(samples, None)  # at its end RandomSampler draws once more from its generator
    if whole < count and not batches.drop_last:
        yield [order[whole:]]


def _indices(batch: Any) -> Tensor:
    try:
        indices = torch.as_tensor(batch)
        if indices.ndim == 1 and not indices.is_floating_point() and not indices.is_complex():
            return indices.to(torch.int64, copy=True)  # a sampler may write the next batch into the same memory
    except (TypeError, ValueError, RuntimeError):
        pass
    raise UsageError(code="sampler-gives-keys", value=str(batch)[:80])


@dataclass(frozen=True)
class DataLoaderEpochPlan(BatchPlan):
    own_order = True
    order: EpochBatches | None = None
    steps: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return self.steps

    def global_indices(self, epoch: int, step: int) -> Tensor:
        """(n,) int64: the samples of batch `step`. The plan is for one epoch."""
        del epoch
        assert self.order is not None
        return self.order.batch_indices(step)


def dataloader_length(loader: DataLoader[Any]) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return 0


def has_torch_sampler(loader: DataLoader[Any]) -> bool:
    """Whether torch's samplers draw the order: then the length is correct, and drawing ahead is harmless."""
    from_torch = type(loader.sampler).__module__.startswith("torch.utils.data")
    return from_torch and type(loader.batch_sampler) is BatchSampler


def is_sequential(loader: DataLoader[Any]) -> bool:
    return type(loader.sampler) is SequentialSampler and has_torch_sampler(loader)


def covers_each_sample_once(loader: DataLoader[Any]) -> bool:
    """Whether an epoch has each sample once, judging by the class of the sampler."""
    sampler = loader.sampler
    is_permutation = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset)  # pyright: ignore
    return is_sequential(loader) or (is_permutation and has_torch_sampler(loader))


def check_not_sharded(loader: DataLoader[Any]) -> None:
    for sampler in (loader.sampler, loader.batch_sampler):
        replicas = getattr(sampler, "num_replicas", None)
        if isinstance(replicas, int) and replicas > 1 and hasattr(sampler, "rank"):
            raise UsageError(code="sampler-of-shards", name=type(sampler).__name__)


class SamplerStateTracker:
    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._first = self._attributes()
        self._has_workers = False  # whether persistent workers exist

    def capture(self) -> dict[str, Any]:
        sources: dict[str, Any] = {name: generator_state(source) for name, source in self._sources().items()}
        changed = {name: value for name, value in self._attributes().items() if value != self._first.get(name)}
        owners = {name: owner for name, owner in self._owners() if _has_state_dict(owner)}
        states = {name: _encode_tensors(owner.state_dict()) for name, owner in owners.items()}
        return {"sources": sources, "attributes": {**changed, **states}, "has_workers": self._has_workers}

    def begin_epoch(self) -> bool:
        """Whether DataLoader draws a seed of its workers now: in each epoch, or once for persistent workers."""
        draws_seed, self._has_workers = not self._has_workers, self._loader.persistent_workers
        return draws_seed

    def restore_generators(self, state: Mapping[str, Any]) -> None:
        sources = self._sources()
        for name, value in state.get("sources", {}).items():
            if name in sources:
                set_generator_state(sources[name], value)

    def restore(self, state: Mapping[str, Any]) -> None:
        self.restore_generators(state)
        self._has_workers = state.get("has_workers", False)
        owners = dict(self._owners())
        for name, owner in owners.items():
            saved = state.get("attributes", {}).get(name)
            if saved is not None and _has_state_dict(owner) and _encode_tensors(owner.state_dict()) != saved:
                owner.load_state_dict(_decode_tensors(saved))
        for full_name, value in state.get("attributes", {}).items():
            owner, _, attribute = full_name.rpartition(".")
            # the initial value may be an attribute of the class
            if owner in owners and hasattr(owners[owner], attribute):
                _put_attribute(owners[owner], attribute, value)

    def _owners(self) -> Iterator[tuple[str, Any]]:
        seen_ids: set[int] = set()
        queue: list[tuple[str, Any, int]] = [
            ("batch_sampler", self._loader.batch_sampler, 0), ("sampler", self._loader.sampler, 0),
        ]  # fmt: skip
        while queue:
            name, owner, depth = queue.pop(0)
            if id(owner) in seen_ids or not hasattr(owner, "__dict__"):
                continue
            seen_ids.add(id(owner))
            yield name, owner
            if depth < MAX_SAMPLER_DEPTH and not _has_state_dict(owner):
                for key, value in vars(owner).items():
                    package = type(value).__module__.partition(".")[0]
                    if isinstance(value, Sampler) or (
                        package not in ("torch", "numpy", "builtins", "paceline") and self._is_part(value)
                    ):
                        queue.append((f"{name}.{key}", value, depth + 1))

    def _is_part(self, value: Any) -> bool:
        is_data = value is self._loader.dataset or isinstance(value, (torch.utils.data.Dataset, torch.nn.Module, type))
        return not is_data and not callable(value) and hasattr(value, "__dict__") and not hasattr(value, "__getitem__")

    def _values(self) -> Iterator[tuple[str, Any]]:
        for name, owner in self._owners():
            for key, value in vars(owner).items() if not _has_state_dict(owner) else ():
                yield f"{name}.{key}", value

    def _sources(self) -> dict[str, Any]:
        generator = self._loader.generator
        sources = {name: value for name, value in self._values() if isinstance(value, RANDOM_GENERATOR_TYPES)}
        return sources if generator is None else {"generator": generator, **sources}

    def _attributes(self) -> dict[str, Any]:
        encoded = ((name, _attribute(value)) for name, value in self._values())
        return {name: value for name, value in encoded if value is not None}


def _attribute(value: Any) -> Any:
    """An attribute as JSON: numbers, strings, lists and dicts of them, tensors, arrays. None for anything else."""
    if isinstance(value, Tensor):
        return (
            {"array": value.detach().tolist()} if value.numel() <= MAX_STATE_ITEMS and not value.is_complex() else None
        )
    if isinstance(value, np.ndarray):
        return {"array": value.tolist()} if value.size <= MAX_STATE_ITEMS and value.dtype.kind in "biuf" else None
    if isinstance(value, (list, tuple, dict)) and len(value) > MAX_STATE_ITEMS:
        return None
    try:
        return {"value": as_json(value)}
    except UsageError:
        return None


def _put_attribute(owner: Any, name: str, encoded: Any) -> None:
    """Restore an attribute. A container keeps its identity, because the loop may refer to it."""
    current = getattr(owner, name)
    if "array" in encoded:
        if isinstance(current, Tensor) and current.shape == torch.as_tensor(encoded["array"]).shape:
            current.copy_(torch.as_tensor(encoded["array"], dtype=current.dtype))
        elif isinstance(current, np.ndarray) and current.shape == np.shape(encoded["array"]):
            current[...] = encoded["array"]
        else:
            create: Any = torch.as_tensor if isinstance(current, Tensor) else np.asarray
            setattr(owner, name, create(encoded["array"], dtype=current.dtype))
        return
    value = from_json(encoded["value"])
    if isinstance(current, list) and isinstance(value, list):
        current[:] = value
    elif type(current) is dict and isinstance(value, dict):
        current.clear()
        current.update(value)  # pyright: ignore[reportUnknownArgumentType]
    else:
        setattr(owner, name, restore_type(current, value))


def _has_state_dict(owner: Any) -> bool:
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


def _encode_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": str(value.dtype).removeprefix("torch."), "values": value.detach().tolist()}
    if isinstance(value, Mapping):
        return {"table": [[as_json(key), _encode_tensors(part)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [_encode_tensors(part) for part in value]}
    return {"value": as_json(value, "sampler")}


def _decode_tensors(saved: Any) -> Any:
    if "tensor" in saved:
        return torch.tensor(saved["values"], dtype=getattr(torch, saved["tensor"]))
    if "table" in saved:
        return {from_json(key): _decode_tensors(part) for key, part in saved["table"]}
    return [_decode_tensors(part) for part in saved["list"]] if "list" in saved else from_json(saved["value"])


def generator_state(source: Any) -> Any:
    if isinstance(source, torch.Generator):
        return base64.b85encode(source.get_state().numpy().tobytes()).decode()
    if hasattr(source, "getstate"):
        return json.dumps(source.getstate())
    state = source.bit_generator.state if isinstance(source, np.random.Generator) else source.get_state(legacy=False)
    return json.dumps(state, default=_to_list)


def set_generator_state(source: Any, value: Any) -> None:
    if isinstance(source, torch.Generator):
        source.set_state(torch.frombuffer(bytearray(base64.b85decode(value)), dtype=torch.uint8))
    elif hasattr(source, "setstate"):
        version, internal_state, gauss = json.loads(value)
        source.setstate((version, tuple(internal_state), gauss))
    elif isinstance(source, np.random.Generator):
        source.bit_generator.state = json.loads(value)
    else:
        source.set_state(json.loads(value))


def global_random_states() -> dict[str, str]:
    return {name: generator_state(source) for name, source in GLOBAL_STREAMS.items()}


def restore_global_random_states(states: Mapping[str, str]) -> None:
    for name, source in GLOBAL_STREAMS.items():
        if name in states:  # old checkpoints have only that of torch
            set_generator_state(source, states[name])


def merge_small_batches(batches: Iterator[Tensor], least: int) -> Iterator[Tensor]:
    """Merge each batch of fewer than `least` samples with the next one, or with the previous one at the end."""
    complete: Tensor | None = None
    pending: Tensor | None = None
    for batch in batches:
        pending = batch if pending is None else torch.cat([pending, batch])
        if len(pending) >= least:
            if complete is not None:
                yield complete
            complete, pending = pending, None
    if pending is not None:
        complete = pending if complete is None else torch.cat([complete, pending])
    if complete is not None:
        yield complete
