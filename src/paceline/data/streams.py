"""Streaming (iterable) datasets: distributes the samples of a stream to virtual ranks, batch by batch.

Samples are numbered from 0 in each epoch. A stream is read in one of two ways:

- Whole: global batch b contains the next samples of one sequence. Each rank reads all samples and keeps its own. With N
  loader processes there are N sequences, and the batches come from them in turn, as in torch's DataLoader.
- Split in V parts: virtual rank v has part v, and a rank reads only the parts of its virtual ranks.

With P parts the n-th sample of part p has number n * P + p. The result does not depend on the number of ranks, and each
rank knows its position after a batch without communication.
"""

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from paceline.data.fingerprint import hash_samples
from paceline.data.loader import LoadingOptions, is_stream, move_to_device
from paceline.data.plan import BatchPlan
from paceline.data.workers import iterate_loader, start_loader
from paceline.errors import UsageError
from paceline.seeding import derive_seed, seed_generators

ENDLESS_NUM_SAMPLES = 1 << 62
PROBES_PER_BATCH = 4  # samples of each batch that are hashed to compare two readings

Position = tuple[int, Any]
"""The position in a part: the number of its batches, and its state; None if it has none, or if it is unknown."""


@dataclass(frozen=True)
class StreamBatchPlan(BatchPlan):
    """The global batches of a stream, as if it were infinite."""

    own_order = True
    parts_of_stream: int = 1
    """The number of virtual ranks if the stream is split, otherwise that of the processes that read it."""
    is_split: bool = False
    sets_epoch: bool = True
    """Whether each epoch calls the `set_epoch` of the stream; False if the user's loop does this."""

    @property
    def epoch_size_text(self) -> str:
        if not self.is_split:
            return "a stream that every rank reads, keeping its own samples"
        return f"a stream in {self.parts_of_stream} parts, one for each virtual rank"


def first_samples(data: Any, count: int) -> Any:
    return [*islice(data, count)] if is_stream(data) else data


def shard_stream(stream: Any, number: int, parts: int) -> Any:
    """Return part `number` of `parts` of a stream."""
    type_name, shards = type(stream).__name__, getattr(stream, "num_shards", None)
    if not callable(getattr(stream, "shard", None)) or not isinstance(shards, int):
        raise UsageError(code="stream-without-shards", kind=type_name)
    if shards < parts:
        raise UsageError(code="too-few-shards", kind=type_name, shards=shards, parts=parts)
    return stream.shard(num_shards=parts, index=number)


class StreamReader:
    """Reads a stream, or one part of it, in each epoch, and numbers its samples."""

    def __init__(self, stream: Any, seed: int, number: int = 0, parts: int = 1) -> None:
        self.number, self.stream, self._seed, self._parts = number, stream, seed, parts
        self._saves = all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict"))
        self._initial_state = self.state()
        self.last: Any = None
        """The last sample of a stream without a state."""

    def state(self) -> Any:
        """The result of the stream's `state_dict()`; None if the stream has none."""
        return copy.deepcopy(self.stream.state_dict()) if self._saves else None

    def seek_sample(self, epoch: int, start: int, state: Any, num_alike: int = 0) -> None:
        """Go to sample `start` of `epoch`: load the `state` at that position, or skip samples if it is None.

        The first `num_alike` samples have the same random numbers in each part. So all parts shuffle in the same way,
        and a comparison finds parts that read the same samples.
        """
        self._epoch, self.taken, self._num_alike, self.last = epoch, 0, num_alike, None
        self._numbered = self._drawn()
        if self._saves:  # some streams start a second iteration where the first one ended
            self.stream.load_state_dict(copy.deepcopy(self._initial_state if state is None else state))
        if getattr(self.stream, "repetitions", 0) == 1:  # webdataset: its stages count how often they were read
            for stage in self.stream.pipeline:
                if isinstance(getattr(stage, "epoch", None), int):
                    stage.epoch = epoch - 1
        seed_generators(derive_seed(self._seed, "stream", epoch, 0 if num_alike else self.number))
        self._samples = iter(self.stream)
        if state is None:
            for _ in islice(self._numbered, start):
                pass
            return
        self.taken = start
        try:
            first = self.take(1)
        except Exception:  # a state of Hugging Face's shuffled streams that was saved in one of several processes
            self.seek_sample(epoch, start, None, num_alike)
        else:
            self._numbered = chain(first, self._numbered)

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the stream, if it has this method."""
        if callable(set_epoch := getattr(self.stream, "set_epoch", None)):
            set_epoch(epoch)

    def take(self, most: int) -> list[tuple[int, Any]]:
        return [*islice(self._numbered, most)]

    def _drawn(self) -> Iterator[tuple[int, Any]]:
        while True:
            number = self.taken * self._parts + self.number
            seed_number = self.taken if self.taken < self._num_alike else number
            seed_generators(derive_seed(self._seed, "sample", self._epoch, seed_number))
            try:
                sample = next(self._samples)
            except StopIteration:
                return
            except Exception as error:
                advice = " Give WebDataset(nodesplitter=None): each rank reads all." * ("nodesplitter" in str(error))
                error.add_note(f"The stream has raised this for sample {number} of epoch {self._epoch + 1}.{advice}")
                raise
            self.taken += 1
            if not self._saves:
                self.last = sample
            yield number, sample


class StreamMicroBatch(NamedTuple):
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


class LocalBatch(NamedTuple):
    micro_batches: list[StreamMicroBatch]
    num_samples: int
    """The number of samples that this rank has read for this batch, including those of other ranks."""
    positions: dict[int, Position]
    """By part number, the positions after this batch. The first is that of the part with the next batch."""
    probe_hash: str
    """A hash of some samples of the first part that this rank reads. At the end it is one of the last sample."""
    is_uniform: bool = False
    """Whether these samples are several, and equal. Known for the first two batches of each of several processes."""

    @property
    def local_samples(self) -> int:
        return sum(len(batch.sample_numbers) for batch in self.micro_batches if batch.counted)


@dataclass(eq=False)
class LocalBatchReader(IterableDataset[LocalBatch]):
    """Yields a rank's chunks, one for each global batch from `start` on. After the end, chunks have no samples."""

    parts: Sequence[StreamReader]
    plan: StreamBatchPlan
    virtual_ranks: range
    epoch: Tensor
    """() int64, shared with processes that read several epochs."""
    positions: Mapping[int, Position] = field(default_factory=dict[int, Position])
    """By part number, the positions in the first epoch, that of the part with the next batch first. Default: 0."""
    min_last_batch: int = 0
    """If the last batch has fewer samples than this, they are added to the previous batch."""
    collate: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        self._first_epoch = self._read_epoch = int(self.epoch)

    @property
    def source(self) -> Any:
        """The stream."""
        return self.parts[0].stream

    @property
    def num_turns(self) -> int:
        """The number of processes whose batches come in turn."""
        return 1 if self.plan.is_split else len(self.parts)

    @property
    def first_turn(self) -> int:
        """The process that has the first batch. The previous ones begin with an empty chunk."""
        return next(iter(self.positions)) if self.positions and not self.plan.is_split else 0

    def __iter__(self) -> Iterator[LocalBatch]:
        plan, padding, worker = self.plan, None, get_worker_info()
        self._read_epoch = int(self.epoch)
        is_first_epoch = self._read_epoch == self._first_epoch
        parts = self.parts if self.num_turns == 1 or worker is None else [self.parts[worker.id]]
        if is_first_epoch and worker is not None and worker.id < self.first_turn:
            yield LocalBatch([], 0, {}, "")
        saved = self.positions if is_first_epoch else {}
        positions = {part.number: saved.get(part.number, (0, None)) for part in parts}
        num_alike = plan.global_batch if self.num_turns > 1 else 0
        for part in parts:
            start, state = positions[part.number]
            part.seek_sample(self._read_epoch, start * self._quota(part), state, num_alike)
        pending: list[tuple[int, Any]] = []  # samples that are read but not in a batch yet
        for number in count(1):
            samples = [part.take(self._quota(part) + self.min_last_batch - len(pending)) for part in parts]
            if self.min_last_batch:
                pending += samples[0]
                is_last = len(pending) < plan.global_batch + self.min_last_batch
                samples = [pending if is_last else pending[: plan.global_batch]]
                pending = [] if is_last else pending[plan.global_batch :]
            padding = next((part_samples[0] for part_samples in samples if part_samples), padding)
            num_samples = sum(map(len, samples))
            after = {part.number: (positions[part.number][0] + number, part.state()) for part in parts}
            probes = [sample for _, sample in samples[0][:: max(1, len(samples[0]) // PROBES_PER_BATCH)]]
            micro_batches = [*self._split(samples)]
            if not micro_batches and padding is not None:
                micro_batches = [self._collate(self.virtual_ranks[0], 0, [padding], counted=False)]
            is_compared = number <= 2 and self.num_turns > 1 and len(probes) > 1
            is_uniform = is_compared and len({hash_samples([sample]) for sample in probes}) == 1
            yield LocalBatch(micro_batches, num_samples, after, hash_samples(probes or [parts[0].last]), is_uniform)

    def _quota(self, part: StreamReader) -> int:
        plan = self.plan
        if not plan.is_split:
            return plan.global_batch
        return len(range(part.number, plan.global_batch, plan.virtual_ranks))

    def _split(self, samples: Sequence[list[tuple[int, Any]]]) -> Iterator[StreamMicroBatch]:
        plan = self.plan
        for index, virtual_rank in enumerate(self.virtual_ranks):
            portion = samples[index] if plan.is_split else samples[0][virtual_rank :: plan.virtual_ranks]
            rest, parts = iter(portion), min(plan.accumulation, len(portion))
            for part in range(parts):
                size = len(range(part, len(portion), parts))  # nearly equal sizes, as in Tensor.tensor_split
                yield self._collate(virtual_rank, part, [*islice(rest, size)])

    def _collate(
        self, virtual_rank: int, part: int, samples: list[tuple[int, Any]], *, counted: bool = True
    ) -> StreamMicroBatch:
        numbers = [number for number, _ in samples]
        # reading the samples of other ranks has changed the random streams
        seed_generators(derive_seed(self.plan.seed, "samples", self._read_epoch, *numbers))
        batch = (self.collate or default_collate)([sample for _, sample in samples])
        return StreamMicroBatch(virtual_rank, part, numbers, counted, batch)


def read_local_batches(reader: LocalBatchReader, loading: LoadingOptions) -> Generator[LocalBatch]:
    """Yield the chunks of a reader on the device. Loader processes, if there are any, read ahead.

    A process that has ended has no more turns, until all have ended.

    Raises:
        UsageError: if all processes read the same samples.
    """
    turns, ended = reader.num_turns, list[LocalBatch]()
    least = reader.plan.global_batch if reader.plan.last_batch == "drop" else 1
    positions = dict(reader.positions) or {part.number: (0, None) for part in reader.parts}
    with closing(_load_chunks(reader, loading)) as loaded:
        first = [*islice(loaded, reader.first_turn, reader.first_turn + turns)] if turns > 1 else []
        compared = first
        if first and all(chunk.is_uniform for chunk in first):  # different parts can all begin with padding
            compared = [*islice(loaded, turns)]
            first = [*first, *compared]
        probes = [chunk.probe_hash for chunk in compared if chunk.num_samples and not chunk.is_uniform]
        if len(probes) > 1 and len({*probes}) == 1:
            raise UsageError(code="stream-repeated-by-processes", value=turns)
        for chunk in chain(first, loaded):
            has_ended = turns > 1 and chunk.num_samples < least
            for number, position in chunk.positions.items():  # its next turn is the last
                before = positions.pop(number)
                positions[number] = before if has_ended else position
            ended = [*ended, chunk] if has_ended else []
            if len(ended) == turns:
                micro_batches = [batch._replace(counted=False) for batch in chunk.micro_batches]
                probe = hash_samples(sorted(part.probe_hash for part in ended))
                chunk, ended = chunk._replace(micro_batches=micro_batches, num_samples=0, probe_hash=probe), []
            if not ended:
                device = loading.device
                moved = [batch._replace(batch=move_to_device(batch.batch, device)) for batch in chunk.micro_batches]
                yield chunk._replace(micro_batches=moved, positions=dict(positions))


def _load_chunks(reader: LocalBatchReader, loading: LoadingOptions) -> Generator[LocalBatch]:
    if not loading.num_workers:
        yield from iterate_loader(iter(reader), None)
        return
    evaluates, kept_loaders = loading.evaluates, loading.kept_loaders

    def make() -> DataLoader[Any]:
        if kept_loaders is not None:
            reader.epoch.share_memory_()
        seed = derive_seed(reader.plan.seed, "workers", int(reader.epoch))
        pin_memory = loading.device.type != "cpu"
        settings = loading.worker_settings(seed)
        return DataLoader(reader, batch_size=None, collate_fn=_identity, pin_memory=pin_memory, **settings)

    if kept_loaders is not None and reader.positions:  # of a resume
        kept_loaders.pop(evaluates, None)
    loader: Any = loading.reuse_or_make_loader(make)
    loader.dataset.epoch.copy_(reader.epoch)
    with closing(iterate_loader(start_loader(loader), loading.page)) as chunks:
        yield from chunks


def _identity(chunk: Any) -> Any:
    return chunk
