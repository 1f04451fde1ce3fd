"""What `Session.loader` gives: a loop over global batches, of which this rank gets its share, body by body."""

import base64
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, default_collate

from paceline.data.fingerprint import data_fingerprint
from paceline.data.loader import Loading, MicroBatch, load_work
from paceline.data.plan import BatchPlan, Work, rank_work
from paceline.data.streams import StreamPlan
from paceline.errors import UsageError
from paceline.sums import gather_words
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


@dataclass(frozen=True)
class OwnOrder(BatchPlan):
    """The batches of one epoch in an order of the user's own, dealt to virtual ranks as ever."""

    own_order = True
    batches: tuple[Tensor, ...] = ()

    @property
    def steps_per_epoch(self) -> int:
        """How many batches it has."""
        return len(self.batches) or 1

    def global_indices(self, epoch: int, step: int) -> Tensor:
        """(n,) int64: the samples of batch `step`, in whichever epoch this order was drawn for."""
        del epoch
        return self.batches[step]


def check_taken(loader: DataLoader[Any]) -> None:
    """Refuse what cannot be taken over.

    Raises:
        UsageError: names it, and what to do.
    """
    odd = {
        "batch_size=None: its dataset gives whole batches": loader.batch_sampler is None,
        "worker_init_fn (randomness is seeded by a sample's number; what a process needs, a file that is open say, "
        "the dataset can make when it is first asked for a sample)": loader.worker_init_fn is not None,
        "in_order=False": not getattr(loader, "in_order", True),
    }
    if found := [words for words, so in odd.items() if so]:
        raise UsageError(
            f"s.loader(DataLoader(...)) cannot take over {', '.join(found)}. Give it the dataset itself: "
            "s.loader(dataset, global_batch=...)"
        )


def taken_over(loader: DataLoader[Any], loading: Loading) -> Loading:
    """`loading` with its processes, their settings, and its function from samples to a batch."""
    return replace(
        loading,
        num_workers=loader.num_workers,
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        workers={name: getattr(loader, name) for name in ("timeout", "prefetch_factor", "multiprocessing_context")},
    )


def keeps_order(loader: DataLoader[Any]) -> bool:
    """Whether it gives its samples as they lie."""
    return isinstance(loader.sampler, SequentialSampler)


def covers_all(loader: DataLoader[Any]) -> bool:
    """Whether an epoch has each of its samples once, as far as its kind of sampler tells."""
    return isinstance(loader.sampler, SequentialSampler) or (
        isinstance(loader.sampler, RandomSampler)
        and not loader.sampler.replacement
        and len(loader.sampler) == len(loader.dataset)  # pyright: ignore[reportArgumentType]
    )


def streams(loader: DataLoader[Any]) -> dict[str, str]:
    """Where the random streams stand from which its order is drawn, as JSON."""
    own = loader.generator
    found = {"torch": _text(torch.get_rng_state())}
    return found if own is None else found | {"generator": _text(own.get_state())}


def draw_order(loader: DataLoader[Any], world: World, put_back: dict[str, str] | None) -> tuple[list[Tensor], Any]:
    """An epoch's batches of indices, the same on all ranks, and the streams as they stood before (a collective).

    Drawn as DataLoader itself would, by each rank, from the streams of rank 0: so a single-device script keeps its
    order. `put_back`: the streams as they stood when this epoch was first drawn, to draw it again after a resume.
    """
    found = put_back if put_back is not None else gather_words(streams(loader), world)[0]
    torch.set_rng_state(_state(found["torch"]))
    if loader.generator is not None and "generator" in found:
        loader.generator.set_state(_state(found["generator"]))
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # DataLoader's seed of its processes
    assert loader.batch_sampler is not None  # see `check_taken`
    batches: Iterator[Any] = iter(loader.batch_sampler)
    return [torch.tensor(batch, dtype=torch.int64) for batch in batches], found


def _text(state: Tensor) -> str:
    return base64.b85encode(state.numpy().tobytes()).decode()


def _state(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b85decode(text)), dtype=torch.uint8)
