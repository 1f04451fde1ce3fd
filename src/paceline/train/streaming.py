"""Iterates over a stream. Before each batch the ranks agree on its size, and on the position after a resume."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from paceline.collectives.control import all_gather_object, check_equal, error_on_one_rank, raise_on_all_ranks
from paceline.data.fingerprint import hash_samples
from paceline.data.loader import LoadingOptions, MicroBatch
from paceline.data.plan import MicroBatchPlan
from paceline.data.streams import (
    LocalBatch,
    LocalBatchReader,
    Position,
    StreamBatchPlan,
    StreamMicroBatch,
    StreamReader,
    read_local_batches,
    shard_stream,
)
from paceline.errors import PacelineError, TrainingError, UsageError
from paceline.rank.world import World
from paceline.seeding import preserve_generator_states
from paceline.train.json_values import as_json, from_json

NO_SAMPLES = hash_samples([])  # the hash of a part after its end, in checkpoints of version 0.1


class GlobalBatchStream:
    """Yields the global batches of a stream of unknown length, for tasks and sessions.

    Each rank reads one batch ahead, and adds the number of its samples in that batch to the totals of the current step.
    So all ranks know the size of the next batch, and whether the stream has ended, without additional communication. A
    batch that was read ahead is not consumed yet: a checkpoint contains the position before it.
    """

    next_batch_samples = 0.0
    """The `next_batch_samples` field of ControlFlags: the samples that this rank has for the next batch."""

    def __init__(
        self, dataset: Any, plan: StreamBatchPlan, loading: LoadingOptions, world: World, say: Callable[[str], None]
    ) -> None:
        self.dataset, self.plan, self.loading = dataset, plan, loading
        self._world, self.say = world, say
        self._is_split, self._parts = plan.is_split, dict[int, StreamReader]()
        count = 1 if plan.is_split else plan.parts_of_stream
        self._whole = [StreamReader(dataset, plan.seed, number, count) for number in range(count)]
        self.saved: dict[str, Any] = {}
        """The `checkpoint_position` from which the next epoch resumes."""
        self._chunks: dict[tuple[int, int], LocalBatch | Exception] = {}  # by (epoch, batch): the current and next one
        self._positions: dict[tuple[int, int], Mapping[int, Position]] = {}  # before each of them
        self._total = self._incomplete = 0  # samples of the current batch; number of incomplete batches in the epoch
        self._is_read = self._trained = False

    def fingerprint(self) -> dict[str, Any]:
        return {"parts of a stream": self.plan.parts_of_stream}

    def first_samples(self, count: int) -> list[Any]:
        readings: list[list[Any]] = []
        for _ in range(2):
            with preserve_generator_states():
                self._whole[0].set_epoch(0)
                self._whole[0].seek_sample(0, 0, None)
                readings.append([sample for _, sample in self._whole[0].take(count)])
        if not readings[0]:
            raise UsageError(code="stream-is-empty")
        if hash_samples(readings[0]) != hash_samples(readings[1]):
            raise UsageError(code="stream-not-repeatable")
        return readings[0]

    def global_batch_samples(self) -> int:
        return self._total

    def is_last_batch(self, batch: int, next_batch_samples: float) -> bool:
        """Whether `batch` is the last batch of the epoch (collective).

        `next_batch_samples` is the sum of the votes, i.e. the size of the next batch. If that batch is incomplete, the
        ranks check that the stream has ended at the same sample on all of them.
        """
        self._total = int(next_batch_samples)
        ends, self._incomplete = not self._continues, self._incomplete + (0 < self._total < self.plan.global_batch)
        if self._total < self.plan.global_batch and not self._is_split:
            ahead = self._ahead
            size = ahead.num_samples if isinstance(ahead, LocalBatch) else None
            check_equal("numbers of samples in the stream", size, self._world, error=TrainingError)
        if ends and self._total:
            self.say(f"the stream has ended: its last {self._total} samples do not fill a batch and are dropped")
        elif ends and self._is_split and self._incomplete > 1:
            self.say(f"{self._incomplete} batches were incomplete: the parts of the stream have different lengths")
        return ends

    def checkpoint_position(self, where: Mapping[str, int], world: World | None) -> Any:
        """The position before a batch: a hash of the batch, and the position of each part."""
        place = where["passes"], where["batch"]
        if place not in self._positions:
            return None
        chunk = self._chunks[place]
        positions = [(number, batches, as_json(state)) for number, (batches, state) in self._positions[place].items()]
        if world is not None and self._is_split:
            positions = [*chain.from_iterable(all_gather_object(positions, world))]
        return {"probe": chunk.probe_hash if isinstance(chunk, LocalBatch) else None, "positions": positions}

    def training_batches(self, plan: object, share: range, epoch: int, start: int) -> Generator[list[MicroBatch]]:
        """Yield the micro-batches of this rank for each step of an epoch from `start` on (its start is collective)."""
        first, chunks, positions = self._open(share, epoch, start)
        current: LocalBatch | Exception
        step, current, self._incomplete = start, first, 0
        self._chunks, self._positions = {(epoch, step): current}, {(epoch, step): positions}
        with closing(chunks):
            while self._continues:
                if isinstance(current, Exception):
                    raise current
                try:
                    self._ahead: LocalBatch | Exception = next(chunks)
                    self.next_batch_samples = float(self._ahead.local_samples)
                except Exception as error:  # raised with the next step, because the current batch is complete
                    self._ahead, self.next_batch_samples = error, float(sum(self._quota(v) for v in share))
                self._chunks = {(epoch, step): current, (epoch, step + 1): self._ahead}
                self._positions = {(epoch, step): positions, (epoch, step + 1): current.positions}
                positions = current.positions
                self._trained = True
                yield [self._micro_batch(batch, epoch, step) for batch in current.micro_batches]
                step, current = step + 1, self._ahead

    def evaluation_batches(self, plan: object, world: World) -> Generator[tuple[Any, int]]:
        """Yield (this rank's portion of a batch, samples of the batch on all ranks) over the unsplit stream."""
        by_rank = replace(self.plan, virtual_ranks=world.size, accumulation=1, last_batch="keep", is_split=False)
        share, collate = range(world.rank, world.rank + 1), self.loading.collate
        reader = LocalBatchReader(
            self._whole, by_rank, share, torch.tensor(0), min_last_batch=world.size, collate=collate
        )
        with closing(self._read(reader, evaluates=True)) as chunks:
            for number, chunk in enumerate(chunks):
                if not number:
                    self._check_equal(all_gather_object(chunk.probe_hash, world))
                if not chunk.num_samples:
                    return
                if chunk.local_samples:
                    yield chunk.micro_batches[0].batch, chunk.num_samples

    @property
    def _continues(self) -> bool:
        return self._total == self.plan.global_batch or (self._total > 0 and self.plan.last_batch == "keep")

    def _quota(self, virtual_rank: int) -> int:
        return len(range(virtual_rank, self.plan.global_batch, self.plan.virtual_ranks))

    def _micro_batch(self, batch: StreamMicroBatch, epoch: int, step: int) -> MicroBatch:
        work = MicroBatchPlan(epoch, step, batch.virtual_rank, batch.micro_batch, batch.indices, batch.counted)
        return MicroBatch(batch.batch, None, work, work.random_seed(self.plan.seed))

    def _open(
        self, share: range, epoch: int, start: int
    ) -> tuple[LocalBatch, Generator[LocalBatch], Mapping[int, Position]]:
        """Go to batch `start` by the saved states, or else by counting.

        Returns the chunk there, the later ones, and the position before it.
        """
        parts, collate, positions = self._parts_of(share), self.loading.collate, dict[int, Position]()
        numbers = {part.number for part in parts}
        if start:  # a checkpoint after the loss of ranks lacks the positions of their parts
            saved = [*(self.saved.get("positions") or ()), *((number, start, None) for number in numbers)]
            for number, batches, state in saved:
                if number in numbers:
                    positions.setdefault(number, (batches, from_json(state)))
        counted: dict[int, Position] = {number: (batches, None) for number, (batches, _) in positions.items()}
        for tried in (positions, counted) if positions != counted else (counted,):
            reader = LocalBatchReader(parts, self.plan, share, torch.tensor(epoch), tried, collate=collate)
            chunks = self._read(reader)
            try:
                if (first := self._check_first(chunks, share, epoch, start)) is not None:
                    return first, chunks, tried
            except BaseException:
                chunks.close()
                raise
            chunks.close()
        raise self._error("stream-differs-from-saved", batch=start)

    def _check_first(self, chunks: Generator[LocalBatch], share: range, epoch: int, start: int) -> LocalBatch | None:
        """Return the first chunk, after a comparison over all ranks; None if it differs from the checkpoint."""
        with nullcontext() if self._trained else raise_on_all_ranks(self._world):
            first = next(chunks)
            # raises an error now, not at the first checkpoint
            as_json([state for _, state in first.positions.values()], "stream")
        has_first_part = any(batch.counted and batch.virtual_rank == share[0] for batch in first.micro_batches)
        is_saved = self.saved.get("probe") in (None, first.probe_hash, None if has_first_part else NO_SAMPLES)
        local = [first.local_samples, bool(first.micro_batches), first.probe_hash, is_saved]
        samples, has_data, probes, saved = zip(*all_gather_object(local, self._world), strict=True)
        if not saved[0]:
            return None
        if not self._is_split:
            self._check_equal(probes)
        self._total = sum(samples)
        if not self._total and not start:
            raise self._error("stream-gives-nothing", epoch=epoch + 1)
        if self._total and not all(has_data):
            raise self._error("stream-part-is-empty")
        return first

    def _parts_of(self, share: range) -> list[StreamReader]:
        if not self._is_split:
            return self._whole
        for v in share:
            if v not in self._parts:
                count = self.plan.virtual_ranks
                self._parts[v] = StreamReader(shard_stream(self.dataset, v, count), self.plan.seed, v, count)
        return [self._parts[v] for v in share]

    def _read(self, reader: LocalBatchReader, *, evaluates: bool = False) -> Generator[LocalBatch]:
        if self._is_read:
            raise UsageError(code="stream-read-twice")
        self._is_read = True
        for part in reader.parts if self.plan.sets_epoch else ():  # here: processes may share the number
            part.set_epoch(int(reader.epoch))
        try:
            with closing(read_local_batches(reader, replace(self.loading, evaluates=evaluates))) as chunks:
                yield from chunks
        finally:
            self._is_read = False

    def _check_equal(self, probes: Sequence[str]) -> None:
        if different := [rank for rank, probe in enumerate(probes) if probe != probes[0]]:
            raise self._error("streams-differ", ranks=different)

    def _error(self, code: str, **fields: Any) -> PacelineError:
        return error_on_one_rank((TrainingError if self._trained else UsageError)(code=code, **fields), self._world)
