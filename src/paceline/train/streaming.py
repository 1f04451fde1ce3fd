"""The passes over a stream: ranks agree batch by batch on what is left of it, and on where a run goes on."""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

from paceline.collectives.control import all_gather_object, check_equal, raise_on_all_ranks, report_on_one_rank
from paceline.data.fingerprint import hash_of
from paceline.data.loader import Loading, MicroBatch
from paceline.data.plan import Work
from paceline.data.streams import Part, Reader, Share, StreamPlan, Stretch, part_of, read_chunks
from paceline.errors import PacelineError, TrainingError, UsageError
from paceline.rank.world import World
from paceline.seeding import preserved_streams
from paceline.train.numbers import as_json, from_json


class Stream:
    """Gives the global batches of a stream, which has no length, to tasks and sessions.

    A rank reads one batch ahead, and says in each step's totals how many samples of it are its own: so all ranks know,
    at no cost, how large the next batch is, and when there is none. What was read ahead is not consumed: a checkpoint
    keeps where the stream stood before it.
    """

    coming = 0.0
    """samples that this rank has of the next batch: a vote"""

    def __init__(
        self, dataset: Any, plan: StreamPlan, loading: Loading, world: World, say: Callable[[str], None]
    ) -> None:
        self.dataset, self.plan, self.loading = dataset, plan, loading
        self._world, self.say = world, say
        self._whole, self._parts = Part(dataset, plan.seed), dict[int, Part]()
        self._is_split = plan.parts_of_stream > 1
        self.saved: dict[str, Any] = {}
        """the `position` that the next pass goes on from"""
        self._chunks: dict[tuple[int, int], Stretch | Exception] = {}  # by pass and batch: the one at hand, the next
        self._total, self._short, self._is_read, self._trained = 0, 0, False, False

    def fingerprint(self) -> dict[str, Any]:
        """In how many parts it is: its samples are compared when it is read."""
        return {"parts of a stream": self.plan.parts_of_stream}

    def head(self, count: int) -> list[Any]:
        """Its first samples, `count` at most.

        Raises:
            UsageError: it is empty, or gives others when it is read again.
        """
        readings: list[list[Any]] = []
        for _ in range(2):
            with preserved_streams():
                self._whole.begin(0, 0, None)
                readings.append([sample for _, sample in self._whole.take(count)])
        if not readings[0]:
            raise UsageError(code="stream-is-empty")
        if hash_of(readings[0]) != hash_of(readings[1]):
            raise UsageError(code="stream-not-repeatable")
        return readings[0]

    def samples(self, work: object = None) -> int:
        """Of the batch at hand, over all ranks."""
        return self._total

    def is_end(self, batch: int, coming: float) -> bool:
        """Whether the pass ends with `batch`; `coming` are the votes of all ranks (a collective).

        Where a batch is not whole, all ranks must have seen the stream end at the same sample.
        """
        self._total = int(coming)
        ends, self._short = not self._goes_on, self._short + (0 < self._total < self.plan.global_batch)
        if self._total < self.plan.global_batch and not self._is_split:
            ahead = self._ahead
            seen = ahead.seen if isinstance(ahead, Stretch) else None
            check_equal("numbers of samples in the stream", seen, self._world, error=TrainingError)
        if ends and self._total:
            self.say(f"the stream has ended: its last {self._total} samples are no whole batch, and left out")
        elif ends and self._short > 1:
            self.say(f"{self._short} batches were not whole: the parts of the stream have different lengths")
        return ends

    def position(self, where: Mapping[str, int], world: World | None) -> Any:
        """A hash of what comes next, and the state of each part before it, where it has one."""
        at = self._chunks.get((where["passes"], where["batch"]))
        if not isinstance(at, Stretch):
            return None
        states = {str(number): as_json(state) for number, state in at.before.items() if state is not None}
        if world is not None and self._is_split:
            states = {
                number: state for of_rank in all_gather_object(states, world) for number, state in of_rank.items()
            }
        return {"probe": at.probe, "states": states}

    def training(self, plan: object, share: range, epoch: int, start: int) -> Generator[list[MicroBatch]]:
        """For each step of an epoch from `start` on, this rank's micro-batches (a collective at its begin)."""
        first, chunks = self._begun(share, epoch, start)
        now: Stretch | Exception
        step, now, self._short = start, first, 0
        self._chunks = {(epoch, step): now}
        with closing(chunks):
            while self._goes_on:
                if isinstance(now, Exception):
                    raise now
                try:
                    self._ahead: Stretch | Exception = next(chunks)
                    self.coming = float(self._ahead.mine)
                except Exception as error:  # when its turn comes: the batch at hand is whole
                    self._ahead, self.coming = error, float(sum(self._quota(v) for v in share))
                self._chunks = {(epoch, step): now, (epoch, step + 1): self._ahead}
                self._trained = True
                yield [self._micro_batch(one, epoch, step) for one in now.shares]
                step, now = step + 1, self._ahead

    def evaluation(self, plan: object, world: World) -> Generator[tuple[Any, int]]:
        """This rank's share of each batch, and of how many samples: whole, whatever training does."""
        dealt = replace(self.plan, virtual_ranks=world.size, accumulation=1, parts_of_stream=1)
        reader = Reader(
            [self._whole], dealt, range(world.rank, world.rank + 1), 0, least=world.size, collate=self.loading.collate
        )
        seen = 0
        with closing(self._read(reader)) as chunks:
            for chunk in chunks:
                if not seen:
                    self._check_alike(all_gather_object(chunk.probe, world))
                if chunk.seen == seen:
                    return
                if chunk.mine:
                    yield chunk.shares[0].batch, chunk.seen - seen
                seen = chunk.seen

    @property
    def _goes_on(self) -> bool:
        return self._total == self.plan.global_batch or (self._total > 0 and self.plan.tail == "keep")

    def _quota(self, virtual_rank: int) -> int:
        return len(range(virtual_rank, self.plan.global_batch, self.plan.virtual_ranks))

    def _micro_batch(self, one: Share, epoch: int, step: int) -> MicroBatch:
        work = Work(epoch, step, one.virtual_rank, one.part, one.indices, one.counted)
        return MicroBatch(one.batch, None, work, work.random_seed(self.plan.seed))

    def _begun(self, share: range, epoch: int, start: int) -> tuple[Stretch, Generator[Stretch]]:
        """The first chunk and those that follow, once all ranks agree that it is the right one (a collective)."""
        saved = {int(number): from_json(state) for number, state in self.saved.get("states", {}).items()}
        for known in (saved, {}) if saved else ({},):
            mine, collate = self._parts_of(share), self.loading.collate
            chunks = self._read(Reader(mine, self.plan, share, epoch, start=start, states=known, collate=collate))
            try:
                if (first := self._agreed(chunks, epoch, start)) is not None:
                    return first, chunks
            except BaseException:
                chunks.close()
                raise
            chunks.close()
        raise self._refused("stream-differs-from-saved", batch=start)

    def _agreed(self, chunks: Generator[Stretch], epoch: int, start: int) -> Stretch | None:
        """The first chunk; None where it is not that which was saved."""
        with nullcontext() if self._trained else raise_on_all_ranks(self._world):
            first = next(chunks)
            as_json(list(first.before.values()), "stream")  # what cannot be saved is refused before the first step
        is_saved = self.saved.get("probe") in (None, first.probe)
        told = all_gather_object([first.mine, bool(first.shares), first.probe, is_saved], self._world)
        if not told[0][3]:
            return None
        if not self._is_split:
            self._check_alike([probe for _, _, probe, _ in told])
        self._total = sum(mine for mine, _, _, _ in told)
        if not self._total and not start:
            raise self._refused("stream-gives-nothing", epoch=epoch + 1)
        if self._total and not all(some for _, some, _, _ in told):
            raise self._refused("stream-part-is-empty")
        return first

    def _parts_of(self, share: range) -> list[Part]:
        if not self._is_split:
            return [self._whole]
        for v in share:
            if v not in self._parts:
                count = self.plan.virtual_ranks
                self._parts[v] = Part(part_of(self.dataset, v, count), self.plan.seed, v, count)
        return [self._parts[v] for v in share]

    def _read(self, reader: Reader) -> Generator[Stretch]:
        if self._is_read:
            raise UsageError(code="stream-read-twice")
        self._is_read = True
        try:
            with closing(read_chunks(reader, self.loading)) as chunks:
                yield from chunks
        finally:
            self._is_read = False

    def _check_alike(self, probes: list[str]) -> None:
        if odd := [rank for rank, probe in enumerate(probes) if probe != probes[0]]:
            raise self._refused("streams-differ", ranks=odd)

    def _refused(self, code: str, **fields: Any) -> PacelineError:
        return report_on_one_rank((TrainingError if self._trained else UsageError)(code=code, **fields), self._world)
