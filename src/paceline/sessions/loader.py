"""What `Session.loader` gives: a loop over global batches, of which this rank gets its share, body by body."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.data.fingerprint import data_fingerprint
from paceline.data.loader import Loading, MicroBatch, load_work
from paceline.data.plan import BatchPlan, Work, rank_work
from paceline.data.streams import StreamPlan
from paceline.sessions.existing import OwnOrder, draw_order
from paceline.train.streaming import Stream
from paceline.worker.world import World

Bodies = list[MicroBatch]
Run = Callable[["Loader"], Iterator[Any]]


class Loader:
    """Batches of one dataset, over and over: iterate it once an epoch.

    In a training loop a batch is this rank's part of the global batch, once for each of its micro-batches. Where
    nothing is trained (under torch.no_grad(), or with all models in eval mode) a batch is this rank's part of it, and
    every sample is seen on one rank only: add up what you count with `Session.sum` or `Session.mean`.
    """

    def __init__(
        self,
        run: Run,
        dataset: Dataset[Any],
        plan: BatchPlan,
        loading: Loading,
        existing: DataLoader[Any] | None,
    ) -> None:
        self._run, self.plan, self.loading, self.existing = run, plan, loading, existing
        self.dataset = dataset

    @property
    def batch_size(self) -> int:
        """Of the global batch."""
        return self.plan.global_batch

    def __len__(self) -> int:
        """The global batches of an epoch."""
        return len(self.existing) if self.existing is not None else self.plan.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of the next epoch."""
        return self._run(self)

    def fingerprint(self) -> dict[str, Any]:
        """What all ranks' data have in common."""
        return data_fingerprint(self.dataset, self.loading)

    def drawn(self, world: World, put_back: dict[str, Any] | None) -> tuple[BatchPlan, dict[str, Any] | None]:
        """The plan of the epoch that begins, and where the random streams stood (a collective)."""
        if self.existing is None:
            return self.plan, None
        batches, streams = draw_order(self.existing, world, put_back)
        p = self.plan
        plan = OwnOrder(
            p.num_samples, max(map(len, batches), default=1), p.virtual_ranks, p.accumulation, p.seed, p.shuffle,
            p.tail, tuple(batches),
        )  # fmt: skip
        return plan, streams

    def training(self, plan: BatchPlan, share: range, epoch: int, start: int) -> Generator[Bodies]:
        """For each step of an epoch from `start` on, this rank's micro-batches."""
        work = (rank_work(plan, epoch, step, share) for step in range(start, len(self)))
        with closing(load_work(self.dataset, work, plan.seed, self.loading)) as loaded:
            for step in loaded:
                yield [MicroBatch(batch, None, one, one.random_seed(plan.seed)) for batch, one in step]

    # what a stream knows only as it goes

    coming = 0.0
    """samples that this rank has of the next batch: a vote"""

    def samples(self, plan: BatchPlan, epoch: int, batch: int) -> int:
        """Of a global batch that is in training."""
        return len(plan.global_indices(epoch, batch))

    def is_end(self, batch: int, coming: float) -> bool:
        """Whether the epoch ends with `batch`; `coming` are the votes of all ranks (for a stream, a collective)."""
        return batch + 1 == len(self)

    def position(self, where: Mapping[str, int], streams: dict[str, Any] | None, world: World | None) -> Any:
        """What a checkpoint keeps of the order, beside the number of the batch; with a `world` a collective."""
        return streams

    def evaluation(self, plan: BatchPlan, world: World) -> Generator[tuple[Any, int]]:
        """This rank's share of each batch, and of how many samples; nothing where it has none."""
        found = [plan.global_indices(0, step) for step in range(len(self))]
        if len(found) > 1 and len(found[-1]) < world.size:  # so few that not every rank would have one
            found[-2:] = [torch.cat(found[-2:])]
        mine = [batch[world.rank :: world.size] for batch in found]
        work = ([Work(0, step, 0, 0, part)] for step, part in enumerate(mine) if len(part))
        with closing(load_work(self.dataset, work, plan.seed, replace(self.loading, evaluates=True))) as loaded:
            for ((batch, work_of_one),) in loaded:
                yield batch, len(found[work_of_one.step])


class StreamLoader(Stream, Loader):
    """Batches of a stream, which has no length."""

    plan: StreamPlan  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, run: Run, stream: Any, plan: StreamPlan, loading: Loading, world: World, say: Callable[[str], None]
    ) -> None:
        Loader.__init__(self, run, stream, plan, loading, None)
        Stream.__init__(self, stream, plan, loading, world, say)

    def __len__(self) -> int:
        """Refuses: nobody knows."""
        raise TypeError("a stream has no length: count steps, and leave its loop by `break` or at its end")

    def drawn(self, world: World, put_back: dict[str, Any] | None) -> tuple[BatchPlan, dict[str, Any] | None]:
        """The plan; what a checkpoint has kept is looked at when the stream is read."""
        self.saved = put_back or {}
        return self.plan, None
