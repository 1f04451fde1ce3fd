"""Data without end: the samples of a stream, numbered from 0 in each epoch, are dealt to virtual ranks batch by batch.

Whole, a stream is one sequence: global batch b is its next samples, dealt as any batch is. Every rank reads all of it
and keeps its samples. In parts, virtual rank v has the v-th of V streams, and a rank reads only those of its virtual
ranks. The n-th sample of part v has number n * V + v. In both cases the number of ranks changes nothing, and each rank
knows the position after a number of batches without communication.
"""

import copy
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils import worker

from paceline.data.fingerprint import hash_of
from paceline.data.loader import Loading, moved
from paceline.data.plan import BatchPlan
from paceline.data.workers import begin_worker, drained, started
from paceline.errors import UsageError
from paceline.seeding import derive, seed_streams

ENDLESS = 1 << 62
PROBES = 4  # samples of each batch by which two readings are compared


@dataclass(frozen=True)
class StreamPlan(BatchPlan):
    """The global batches of a stream, as if it never ended."""

    own_order = True
    parts_of_stream: int = 1
    """1: it is one sequence; else the number of virtual ranks"""

    @property
    def size_words(self) -> str:
        """For the opening line."""
        if self.parts_of_stream == 1:
            return "a stream that every rank reads, keeping its own samples"
        return f"a stream in {self.parts_of_stream} parts, one for each virtual rank"


def is_stream(data: object) -> bool:
    """Whether it can only be read sample after sample."""
    return isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")


def first_of(data: Any, count: int) -> Any:
    """`data`; of a stream its first samples, `count` at most, which have numbers."""
    return [*islice(data, count)] if is_stream(data) else data


def part_of(stream: Any, number: int, parts: int) -> Any:
    """Part `number` of `parts` of a stream.

    Raises:
        UsageError: if it cannot be split into that number of parts.
    """
    kind, shards = type(stream).__name__, getattr(stream, "num_shards", None)
    if not callable(getattr(stream, "shard", None)) or not isinstance(shards, int):
        raise UsageError(code="stream-without-shards", kind=kind)
    if shards < parts:
        raise UsageError(code="too-few-shards", kind=kind, shards=shards, parts=parts)
    return stream.shard(num_shards=parts, index=number)


class Part:
    """A stream, or one part of it, epoch after epoch: gives its samples by number."""

    def __init__(self, stream: Any, seed: int, number: int = 0, parts: int = 1) -> None:
        self.number, self._stream, self._seed, self._parts = number, stream, seed, parts
        self._saves = all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict"))
        self._blank = self.state()

    def state(self) -> Any:
        """Its position, from its `state_dict`; None if it has none."""
        return copy.deepcopy(self._stream.state_dict()) if self._saves else None

    def begin(self, epoch: int, start: int, state: Any) -> None:
        """Go to sample `start` of `epoch`: by the `state` that it had there, or without one by counting."""
        self._epoch, self.taken = epoch, 0
        if self._saves:  # some begin a second time where they ended
            self._stream.load_state_dict(copy.deepcopy(self._blank if state is None else state))
        if callable(set_epoch := getattr(self._stream, "set_epoch", None)):
            set_epoch(epoch)
        if getattr(self._stream, "repetitions", 0) == 1:  # webdataset: its stages count how often they were read
            for stage in self._stream.pipeline:
                if isinstance(getattr(stage, "epoch", None), int):
                    stage.epoch = epoch - 1
        seed_streams(derive(self._seed, "stream", epoch, self.number))
        self._samples = iter(self._stream)
        if state is not None:
            self.taken = start
            return
        for _ in self._drawn(start):
            pass

    def take(self, most: int) -> list[tuple[int, Any]]:
        """The next samples, each with its number; fewer than `most` at the end."""
        return [*self._drawn(most)]

    def _drawn(self, most: int) -> Iterator[tuple[int, Any]]:
        for _ in range(most):
            number = self.taken * self._parts + self.number
            seed_streams(derive(self._seed, "sample", self._epoch, number))
            try:
                sample = next(self._samples)
            except StopIteration:
                return
            except Exception as error:
                advice = " Give WebDataset(nodesplitter=None): each rank reads all." * ("nodesplitter" in str(error))
                error.add_note(f"The stream has raised this for sample {number} of epoch {self._epoch + 1}.{advice}")
                raise
            self.taken += 1
            yield number, sample


class Share(NamedTuple):
    """One micro-batch of a virtual rank; a padding batch, for a rank that has none, is not counted."""

    virtual_rank: int
    part: int
    numbers: list[int]
    counted: bool
    batch: Any

    @property
    def indices(self) -> Tensor:
        """(n,) int64: its numbers."""
        return torch.tensor(self.numbers, dtype=torch.int64)


class Stretch(NamedTuple):
    """The micro-batches of a rank in one global batch."""

    shares: list[Share]
    seen: int
    """samples up to the end of this batch, in all that it reads"""
    before: dict[int, Any]
    """the state of each part before this batch, if it has one"""
    probe: str
    """a hash of some samples of the first part that it reads"""

    @property
    def mine(self) -> int:
        """Samples of this rank."""
        return sum(len(share.numbers) for share in self.shares if share.counted)


@dataclass(eq=False)
class Reader(IterableDataset[Stretch]):
    """Reads a rank's chunks, one for each global batch from `start` on, without end: with no samples after the end."""

    parts: Sequence[Part]
    plan: StreamPlan
    share: range
    epoch: int
    start: int = 0
    states: Mapping[int, Any] = field(default_factory=dict[int, Any])
    """by part, its state before batch `start`"""
    least: int = 0
    """a last batch of fewer samples belongs to the batch before it"""
    collate: Callable[[list[Any]], Any] | None = None

    def __iter__(self) -> Iterator[Stretch]:
        worker._worker_info = None  # pyright: ignore[reportPrivateUsage] - a stream splits nothing by itself here
        plan, spare = self.plan, None
        for part in self.parts:
            part.begin(self.epoch, self.start * self._quota(part), self.states.get(part.number))
        waiting: list[tuple[int, Any]] = []  # read and not yet in a batch
        for _ in count():
            before = {part.number: part.state() for part in self.parts}
            samples = [part.take(self._quota(part) + self.least - len(waiting)) for part in self.parts]
            if self.least:
                waiting += samples[0]
                last = len(waiting) < plan.global_batch + self.least
                samples = [waiting if last else waiting[: plan.global_batch]]
                waiting = [] if last else waiting[plan.global_batch :]
            spare = next((of_part[0] for of_part in samples if of_part), spare)
            seen = sum(part.taken for part in self.parts) - len(waiting)
            probed = samples[0][:: max(1, len(samples[0]) // PROBES)]
            shares = [*self._dealt(samples)]
            if not shares and spare is not None:
                shares = [self._collated(self.share[0], 0, [spare], counted=False)]
            yield Stretch(shares, seen, before, hash_of(sample for _, sample in probed))

    def _quota(self, part: Part) -> int:
        """How many samples of a part are in one global batch."""
        plan = self.plan
        if plan.parts_of_stream == 1:
            return plan.global_batch
        return len(range(part.number, plan.global_batch, plan.virtual_ranks))

    def _dealt(self, samples: Sequence[list[tuple[int, Any]]]) -> Iterator[Share]:
        plan = self.plan
        for at, virtual_rank in enumerate(self.share):
            mine = samples[at] if plan.parts_of_stream > 1 else samples[0][virtual_rank :: plan.virtual_ranks]
            rest, micro = iter(mine), min(plan.accumulation, len(mine))
            for k in range(micro):
                size = len(range(k, len(mine), micro))  # nearly equal, as torch splits a tensor
                yield self._collated(virtual_rank, k, [*islice(rest, size)])

    def _collated(self, virtual_rank: int, part: int, samples: list[tuple[int, Any]], *, counted: bool = True) -> Share:
        numbers = [number for number, _ in samples]
        seed_streams(derive(self.plan.seed, "samples", self.epoch, *numbers))  # which other ranks' samples have moved
        batch = (self.collate or default_collate)([sample for _, sample in samples])
        return Share(virtual_rank, part, numbers, counted, batch)


def read_chunks(reader: Reader, loading: Loading) -> Generator[Stretch]:
    """The chunks of a reader on the device; with a loader process, that one reads ahead."""
    box, chunks = None, iter(reader)
    if loading.num_workers:
        box = loading.box
        loader = DataLoader(
            reader, batch_size=None, num_workers=1, collate_fn=_as_it_is, pin_memory=loading.device.type != "cpu",
            worker_init_fn=partial(begin_worker, os.getpid()), generator=torch.Generator().manual_seed(0),
            **loading.workers,
        )  # fmt: skip
        chunks = started(loader)
    with closing(drained(chunks, box)) as read_on:
        for chunk in read_on:
            shares = [share._replace(batch=moved(share.batch, loading.device)) for share in chunk.shares]
            yield chunk._replace(shares=shares)


def _as_it_is(chunk: Any) -> Any:
    return chunk
