"""Streaming (iterable) datasets: distributes the samples of a stream to virtual ranks, batch by batch.

Samples are numbered from 0 in each epoch. A stream is read in one of two ways:

- Unsplit: global batch b contains the next samples of one sequence. Each rank reads all samples and keeps its own.
- In V parts: virtual rank v has part v, and a rank reads only the parts of its virtual ranks. The n-th sample of part v
  has number n * V + v.

In both cases the result does not depend on the number of ranks, and each rank knows its position after a number of
batches without communication.
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
from paceline.data.loader import Loading, move_to_device
from paceline.data.plan import BatchPlan
from paceline.data.workers import initialize_worker, iterate_loader, start_loader
from paceline.errors import UsageError
from paceline.seeding import derive_seed, seed_streams

ENDLESS_NUM_SAMPLES = 1 << 62
PROBES_PER_BATCH = 4  # samples of each batch that are hashed to compare two readings


@dataclass(frozen=True)
class StreamPlan(BatchPlan):
    """The global batches of a stream, as if it were infinite."""

    own_order = True
    parts_of_stream: int = 1  # 1 for an unsplit stream, otherwise the number of virtual ranks

    @property
    def size_text(self) -> str:
        if self.parts_of_stream == 1:
            return "a stream that every rank reads, keeping its own samples"
        return f"a stream in {self.parts_of_stream} parts, one for each virtual rank"


def is_stream(data: object) -> bool:
    return isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")


def first_of(data: Any, count: int) -> Any:
    return [*islice(data, count)] if is_stream(data) else data


def part_of(stream: Any, number: int, parts: int) -> Any:
    """Return part `number` of `parts` of a stream."""
    type_name, shards = type(stream).__name__, getattr(stream, "num_shards", None)
    if not callable(getattr(stream, "shard", None)) or not isinstance(shards, int):
        raise UsageError(code="stream-without-shards", kind=type_name)
    if shards < parts:
        raise UsageError(code="too-few-shards", kind=type_name, shards=shards, parts=parts)
    return stream.shard(num_shards=parts, index=number)


class StreamPart:
    """Reads a stream, or one part of it, in each epoch, and numbers its samples."""

    def __init__(self, stream: Any, seed: int, number: int = 0, parts: int = 1) -> None:
        self.number, self._stream, self._seed, self._parts = number, stream, seed, parts
        self._saves = all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict"))
        self._initial_state = self.state()

    def state(self) -> Any:
        """The result of the stream's `state_dict()`; None if the stream has none."""
        return copy.deepcopy(self._stream.state_dict()) if self._saves else None

    def begin(self, epoch: int, start: int, state: Any) -> None:
        """Go to sample `start` of `epoch`: load the `state` at that position, or skip samples if it is None."""
        self._epoch, self.taken = epoch, 0
        if self._saves:  # some streams start a second iteration where the first one ended
            self._stream.load_state_dict(copy.deepcopy(self._initial_state if state is None else state))
        if callable(set_epoch := getattr(self._stream, "set_epoch", None)):
            set_epoch(epoch)
        if getattr(self._stream, "repetitions", 0) == 1:  # webdataset: its stages count how often they were read
            for stage in self._stream.pipeline:
                if isinstance(getattr(stage, "epoch", None), int):
                    stage.epoch = epoch - 1
        seed_streams(derive_seed(self._seed, "stream", epoch, self.number))
        self._samples = iter(self._stream)
        if state is not None:
            self.taken = start
            return
        for _ in self._drawn(start):
            pass

    def take(self, most: int) -> list[tuple[int, Any]]:
        return [*self._drawn(most)]

    def _drawn(self, limit: int) -> Iterator[tuple[int, Any]]:
        for _ in range(limit):
            number = self.taken * self._parts + self.number
            seed_streams(derive_seed(self._seed, "sample", self._epoch, number))
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


class StreamBatch(NamedTuple):
    """One micro-batch of a virtual rank. A padding batch, for a rank without samples, has `counted=False`."""

    virtual_rank: int
    micro_batch: int
    sample_numbers: list[int]
    counted: bool
    batch: Any

    @property
    def indices(self) -> Tensor:
        """(n,) int64: the numbers of the samples."""
        return torch.tensor(self.sample_numbers, dtype=torch.int64)


class StreamChunk(NamedTuple):
    micro_batches: list[StreamBatch]
    num_samples_seen: int
    """The number of samples that this rank has read up to the end of this batch, including those of other ranks."""
    states_before: dict[int, Any]  # the state of each part before this batch; None for a part without a state
    probe_hash: str  # a hash of some samples of the first part that this rank reads

    @property
    def local_samples(self) -> int:
        return sum(len(batch.sample_numbers) for batch in self.micro_batches if batch.counted)


@dataclass(eq=False)
class ChunkReader(IterableDataset[StreamChunk]):
    """Yields a rank's chunks, one for each global batch from `start` on. After the end, chunks have no samples."""

    parts: Sequence[StreamPart]
    plan: StreamPlan
    virtual_ranks: range
    epoch: int
    start: int = 0
    states: Mapping[int, Any] = field(default_factory=dict[int, Any])  # by part number, the state before batch `start`
    min_last_batch: int = 0  # if the last batch has fewer samples than this, they are added to the previous batch
    collate: Callable[[list[Any]], Any] | None = None

    def __iter__(self) -> Iterator[StreamChunk]:
        worker._worker_info = None  # pyright: ignore[reportPrivateUsage] - so that the stream does not split itself by worker
        plan, padding = self.plan, None
        for part in self.parts:
            part.begin(self.epoch, self.start * self._quota(part), self.states.get(part.number))
        pending: list[tuple[int, Any]] = []  # samples that are read but not in a batch yet
        for _ in count():
            states_before = {part.number: part.state() for part in self.parts}
            samples = [part.take(self._quota(part) + self.min_last_batch - len(pending)) for part in self.parts]
            if self.min_last_batch:
                pending += samples[0]
                is_last = len(pending) < plan.global_batch + self.min_last_batch
                samples = [pending if is_last else pending[: plan.global_batch]]
                pending = [] if is_last else pending[plan.global_batch :]
            padding = next((part_samples[0] for part_samples in samples if part_samples), padding)
            num_seen = sum(part.taken for part in self.parts) - len(pending)
            probes = samples[0][:: max(1, len(samples[0]) // PROBES_PER_BATCH)]
            micro_batches = [*self._split(samples)]
            if not micro_batches and padding is not None:
                micro_batches = [self._collate(self.virtual_ranks[0], 0, [padding], counted=False)]
            yield StreamChunk(micro_batches, num_seen, states_before, hash_of(sample for _, sample in probes))

    def _quota(self, part: StreamPart) -> int:
        plan = self.plan
        if plan.parts_of_stream == 1:
            return plan.global_batch
        return len(range(part.number, plan.global_batch, plan.virtual_ranks))

    def _split(self, samples: Sequence[list[tuple[int, Any]]]) -> Iterator[StreamBatch]:
        plan = self.plan
        for index, virtual_rank in enumerate(self.virtual_ranks):
            portion = samples[index] if plan.parts_of_stream > 1 else samples[0][virtual_rank :: plan.virtual_ranks]
            rest, parts = iter(portion), min(plan.accumulation, len(portion))
            for part in range(parts):
                size = len(range(part, len(portion), parts))  # nearly equal sizes, as in Tensor.tensor_split
                yield self._collate(virtual_rank, part, [*islice(rest, size)])

    def _collate(
        self, virtual_rank: int, part: int, samples: list[tuple[int, Any]], *, counted: bool = True
    ) -> StreamBatch:
        numbers = [number for number, _ in samples]
        # reading the samples of other ranks has changed the random streams
        seed_streams(derive_seed(self.plan.seed, "samples", self.epoch, *numbers))
        batch = (self.collate or default_collate)([sample for _, sample in samples])
        return StreamBatch(virtual_rank, part, numbers, counted, batch)


def read_chunks(reader: ChunkReader, loading: Loading) -> Generator[StreamChunk]:
    """Yield the chunks of a reader on the device. A loader process, if there is one, reads ahead."""
    page, chunks = None, iter(reader)
    if loading.num_workers:
        page = loading.page
        loader = DataLoader(
            reader, batch_size=None, num_workers=1, collate_fn=_identity, pin_memory=loading.device.type != "cpu",
            worker_init_fn=partial(initialize_worker, os.getpid()), generator=torch.Generator().manual_seed(0),
            **loading.workers,
        )  # fmt: skip
        chunks = start_loader(loader)
    with closing(iterate_loader(chunks, page)) as loaded:
        for chunk in loaded:
            yield chunk._replace(
                micro_batches=[b._replace(batch=move_to_device(b.batch, loading.device)) for b in chunk.micro_batches]
            )


def _identity(chunk: Any) -> Any:
    return chunk
