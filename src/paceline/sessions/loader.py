"""The data loader of a session: iterates over global batches and yields the micro-batches of this rank."""

import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import count, takewhile
from typing import Any, NamedTuple

from msgspec import structs
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from paceline.collectives.control import all_gather_object, check_equal, error_on_one_rank
from paceline.data.fingerprint import data_fingerprint, hash_probe_samples
from paceline.data.loader import (
    LoadingOptions,
    MicroBatch,
    index_of_largest_sample,
    load_dummy_batch,
    load_micro_batch_for_audit,
    load_planned_batches,
)
from paceline.data.plan import BatchPlan, MicroBatchPlan, plan_rank_micro_batches
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.seeding import preserve_generator_states
from paceline.sessions.order import (
    DataLoaderEpochPlan,
    EpochBatches,
    SamplerStateTracker,
    check_not_sharded,
    covers_each_sample_once,
    dataloader_length,
    global_random_states,
    has_torch_sampler,
    is_sequential,
    merge_small_batches,
    restore_global_random_states,
)

MicroBatches = list[MicroBatch]
IterateLoader = Callable[["Loader"], Iterator[Any]]
COMPARED_BATCHES = 64  # batches of an evaluation whose order is compared before it begins
Size = tuple[int, ...]
MAX_DUMMY_TRIES = 1000  # samples to try until one is not None
CHECKPOINT_KEYS = ("order", "drawn", "at_checkpoint")  # keys of a position; others are of the start of the epoch
SAME_ORDER = "orders of samples of this DataLoader"


class Loader:
    """Batches of one dataset. Iterate over it once per epoch.

    In a training loop it yields the micro-batches of this rank. In an evaluation (under torch.no_grad(), or with all
    models in eval mode) it yields this rank's part of each batch, and each sample is on one rank only: add counts over
    ranks with `Session.sum` or `Session.mean`.
    """

    is_stream = False

    def __init__(
        self, run: IterateLoader, dataset: Dataset[Any], plan: BatchPlan, loading: LoadingOptions,
        existing: DataLoader[Any] | None,
    ) -> None:  # fmt: skip
        self._run, self.plan, self.loading, self.existing = run, plan, loading, existing
        self.dataset = dataset
        self.order: EpochBatches | None = None
        self.dealt: BatchPlan | None = None  # the plan of the current training epoch; None for a stream
        self._streams: dict[str, Any] = {}  # random streams and state of the sampler at the start of the epoch
        self._sampler = None if existing is None else SamplerStateTracker(existing)
        self._is_torchs = existing is not None and has_torch_sampler(existing)
        self.short_epoch: Callable[[BatchPlan], tuple[int, int]] | None = None
        """of an observer: plan -> number of whole global batches of an epoch, and samples of its last, short batch"""

        self.is_unsplit = False  # with micro_batch="auto": whether the number of micro-batches is not known yet
        self.found_accumulation: int | None = None
        """with micro_batch="auto": the number of micro-batches per virtual rank and step"""

    def set_accumulation(self, accumulation: int) -> None:
        self.plan = replace(self.plan, accumulation=accumulation)
        self.is_unsplit, self.found_accumulation = False, accumulation

    def make_dummy_batch_function(self, share: range) -> Callable[[int], MicroBatch]:
        with preserve_generator_states():
            index = index_of_largest_sample(self.dataset, self.plan.seed, self.loading)

        def load(size: int) -> MicroBatch:
            with preserve_generator_states():
                batch = load_dummy_batch(self.dataset, index, size, self.plan, share, self._counting())
            return batch if self.loading.collate is None else _with_count(batch)

        return load

    @property
    def batch_size(self) -> int:
        """Number of samples of a global batch."""
        return self.plan.global_batch

    @property
    def sampler(self) -> Any:
        """The sampler of the DataLoader, for example for `set_epoch`; None without a DataLoader."""
        return None if self.existing is None else self.existing.sampler

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of the DataLoader; None without a DataLoader."""
        return None if self.existing is None else self.existing.batch_sampler

    def __len__(self) -> int:
        """Number of global batches of an epoch."""
        full = len(self.existing) if self.existing is not None else self.plan.steps_per_epoch
        return full if self.short_epoch is None else min(full, self.short_epoch(self.plan)[0] + 1)

    def __iter__(self) -> Iterator[Any]:
        """The batches of this rank in the next epoch."""
        return self._run(self)

    def fingerprint(self) -> dict[str, Any]:
        """A description of the data, which must be equal on all ranks."""
        return data_fingerprint(self.dataset, self.loading)

    def data_checksum(self) -> int:
        """A checksum of its length and a few samples. It changes if the loop changes the dataset."""
        return zlib.crc32(f"{len(self.dataset)} {hash_probe_samples(self.dataset, self.loading)}".encode())  # pyright: ignore[reportArgumentType]

    def draw_epoch_plan(
        self, world: World, saved_position: dict[str, Any] | None, start: int = 0, *, is_training: bool = False
    ) -> BatchPlan:
        """The plan of the epoch that begins (a collective).

        Args:
            world: the ranks.
            saved_position: the result of `checkpoint_position`, if the epoch resumes at batch `start`; None otherwise.
            start: the first batch to compute.
            is_training: whether this is a training epoch, whose order checkpoints contain.

        Raises:
            UsageError: the samplers of the ranks differ in length, or the order differs from that before the resume.
        """
        short = None if self.short_epoch is None else self.short_epoch(self.plan)
        if self.existing is None:
            size = len(self.dataset)  # pyright: ignore[reportArgumentType]
            if size != self.plan.num_samples:
                self.plan = replace(self.plan, num_samples=size)
            num_samples = size if short is None else min(size, short[0] * self.plan.global_batch + short[1])
            self.dealt = self.plan if num_samples == size else replace(self.plan, num_samples=num_samples)
            return self.dealt
        assert self._sampler is not None
        steps = dataloader_length(self.existing)
        if saved_position is None:
            state = {**global_random_states(), "sampler": self._sampler.capture()}
            by_rank: list[tuple[int, dict[str, Any]]] = all_gather_object((steps, state), world)
            if len({length for length, _ in by_rank}) > 1:
                lengths = ", ".join(f"{length} on rank {rank}" for rank, (length, _) in enumerate(by_rank))
                raise error_on_one_rank(
                    UsageError(
                        code="order-differs", what=f"the lengths of their DataLoaders differ: {lengths} batches"
                    ),
                    world,
                )
            attributes = [rank_state["sampler"]["attributes"] for _, rank_state in by_rank]
            if any(values != attributes[0] for values in attributes):
                names = {name for values in attributes for name in values}
                differing = min(name for name in names if len({str(values.get(name)) for values in attributes}) > 1)
                raise error_on_one_rank(
                    UsageError(code="order-differs", what=f"the attribute {differing} differs between ranks"), world
                )
            saved_position = by_rank[0][1]
            if world.rank:
                self._sampler.restore_generators(saved_position["sampler"])
        else:
            self._sampler.restore(saved_position.get("sampler", {}))
        restore_global_random_states(saved_position)
        order = EpochBatches(self.existing, short, draws_seed=self._sampler.begin_epoch())
        if "at_checkpoint" in saved_position:  # an evaluation in the epoch may have drawn from them
            order.has_batch(saved_position["drawn"] - 1)
            restore_global_random_states(saved_position["at_checkpoint"])
        if is_training:
            self._streams = {name: value for name, value in saved_position.items() if name not in CHECKPOINT_KEYS}
            self.order = order
        if "order" in saved_position and order.hash_at(start - 1) != saved_position["order"]:
            raise error_on_one_rank(
                UsageError(code="resumed-order-differs", what=type(self.existing.sampler).__name__, batch=start), world
            )
        if "at_checkpoint" in saved_position:  # changes by the loop during the epoch
            self._sampler.restore(saved_position["at_checkpoint"]["sampler"])
        p, samples = self.plan, self.existing.batch_size or (len(order.batch_indices(0)) if order.has_batch(0) else 1)
        plan = DataLoaderEpochPlan(
            p.num_samples, samples, p.virtual_ranks, p.accumulation, p.seed, p.shuffle, p.last_batch, order, steps or 1
        )
        if is_training:
            self.dealt = plan
        return plan

    def training_batches(self, plan: BatchPlan, share: range, epoch: int, start: int) -> Generator[MicroBatches]:
        """For each step of an epoch from `start` on: the micro-batches of this rank."""
        steps = takewhile(self.order.has_batch, count(start)) if self.order else iter(range(start, len(self)))
        work = map(partial(plan_rank_micro_batches, plan, epoch, share=share), steps)
        is_counted = self.loading.collate is not None
        with closing(load_planned_batches(self.dataset, work, plan.seed, self._counting())) as loaded:
            for step in loaded:
                if self.order:
                    self.order.needed = step[0].work.step - 1
                yield [_with_count(batch) for batch in step] if is_counted else step

    def reload_micro_batch(self, plan: BatchPlan, epoch: int, step: int, virtual_rank: int) -> MicroBatch | None:
        batch = load_micro_batch_for_audit(self.dataset, self._counting(), plan, epoch, step, virtual_rank)
        return batch if batch is None or self.loading.collate is None else _with_count(batch)

    def _counting(self) -> LoadingOptions:
        """Its loading. A collate function of the user also counts the samples of its batches."""
        loading, collate = self.loading, self.loading.collate
        return loading if collate is None else replace(loading, collate=CountingCollate(collate, self.dataset))

    @property
    def sampler_state(self) -> dict[str, Any] | None:
        """The state of the sampler between two epochs; None without a DataLoader."""
        return None if self._sampler is None else self._sampler.capture()

    def restore_sampler(self, state: dict[str, Any]) -> None:
        """Restore the `sampler_state` of a checkpoint."""
        if self._sampler is not None:
            self._sampler.restore(state)

    @property
    def uses_no_random_numbers(self) -> bool:
        """Whether no code of the user runs between two batches, so that nothing there draws random numbers."""
        existing, dataset = self.existing, self.dataset
        if existing is not None and not (
            covers_each_sample_once(existing) and getattr(existing.sampler, "generator", None) is None
        ):
            return False
        return type(dataset) is TensorDataset and self.loading.collate is None

    # a stream overrides these

    def is_last_batch(self, batch: int, next_batch_samples: float) -> bool:
        """Whether the epoch is known to end with `batch` (a collective for a stream).

        `next_batch_samples`: the sum of the votes. A custom sampler is not asked early, so its end is not known.
        """
        if self.order is None:
            return batch + 1 == len(self)
        return self._is_torchs and not self.order.has_batch(batch + 1)

    def checkpoint_position(self, where: Mapping[str, int], world: World | None) -> Any:
        """The state of the order for a checkpoint, without the number of the batch (a collective with a `world`)."""
        if self.order is None:
            return None
        assert self._sampler is not None
        order_hash, num_drawn_batches = self.order.hash_at(where["batch"] - 1), self.order.num_drawn_batches
        current_state = {**global_random_states(), "sampler": self._sampler.capture()}
        return {**self._streams, "order": order_hash, "drawn": num_drawn_batches, "at_checkpoint": current_state}

    @staticmethod
    def draw_first_evaluation_batches(plan: BatchPlan) -> None:
        """Draw the first batches of an evaluation."""
        if isinstance(plan, DataLoaderEpochPlan) and plan.order is not None:
            plan.order.has_batch(COMPARED_BATCHES - 1)

    def evaluation_batches(self, plan: BatchPlan, world: World) -> Generator[tuple[Any, int]]:
        """This rank's part of each batch, unless it is empty, with the size of the batch (a collective)."""
        drawn_order = plan.order if isinstance(plan, DataLoaderEpochPlan) else None
        order = drawn_order if self.existing is not None and not is_sequential(self.existing) else None
        if order is not None:
            check_equal(SAME_ORDER, order.hash_at(COMPARED_BATCHES - 1), world)
        steps = takewhile(drawn_order.has_batch, count()) if drawn_order else iter(range(len(self)))
        sizes: dict[int, int] = {}

        def work() -> Generator[list[MicroBatchPlan]]:
            indices = (plan.global_indices(0, step) for step in steps)
            for step, batch in enumerate(merge_small_batches(indices, world.size)):
                sizes[step] = len(batch)
                if len(rank_indices := batch[world.rank :: world.size]):
                    yield [MicroBatchPlan(0, step, 0, 0, rank_indices)]

        loading = replace(self._counting(), evaluates=True)
        with closing(load_planned_batches(self.dataset, work(), plan.seed, loading)) as loaded:
            for (micro_batch,) in loaded:
                batch, size = micro_batch.inputs, sizes.pop(micro_batch.work.step)
                if not isinstance(batch, CountedBatch):
                    yield batch, size
                elif batch.samples:
                    yield batch.batch, size
        if order is not None and order.has_batch(COMPARED_BATCHES):
            check_equal(SAME_ORDER, order.hash_at(10**12), world)


def check_dataloader(loader: DataLoader[Any]) -> None:
    """Check that a DataLoader can be used.

    Raises:
        UsageError: it has a setting that is not supported.
    """
    settings = {
        "batch_size=None: its dataset gives whole batches": loader.batch_sampler is None,
        f"the __iter__ of a {type(loader).__name__}": type(loader).__iter__ is not DataLoader.__iter__,
        "in_order=False": not getattr(loader, "in_order", True),
    }
    if unsupported := [setting for setting, is_set in settings.items() if is_set]:
        raise UsageError(code="loader-not-taken-over", options=", ".join(unsupported))
    check_not_sharded(loader)


def adopt_worker_settings(loader: DataLoader[Any], loading: LoadingOptions) -> LoadingOptions:
    """`loading` with the worker processes of a DataLoader, their settings, and its collate function."""
    return replace(
        loading,
        num_workers=loader.num_workers,
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        workers={name: getattr(loader, name) for name in ("timeout", "prefetch_factor", "multiprocessing_context")},
        worker_init_fn=loader.worker_init_fn,
        kept_loaders={} if loader.persistent_workers else None,
    )


def _with_count(batch: MicroBatch) -> MicroBatch:
    counted, work = batch.inputs, batch.work
    if not counted.samples:  # the collate function dropped all samples, so this is a dummy batch
        work = structs.replace(work, is_counted=False)
    return structs.replace(batch, inputs=counted.batch, work=work, samples=counted.samples)


class CountedBatch(NamedTuple):
    """A batch of a collate function, and its number of samples; -1 if unknown."""

    batch: Any
    samples: int


class CountingCollate:
    """Calls a collate function, which may drop samples, and counts the samples of each batch."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any) -> None:
        self._collate, self._dataset = collate, dataset
        self._batch_is_later: bool | None = None  # whether the first dimension is not that of samples

    def __call__(self, items: list[Any]) -> CountedBatch:
        """The batch, counted."""
        total, kept = len(items), [item for item in items if item is not None]
        ids = {id(item) for item in kept}
        try:
            batch = self._collate(items)
        except Exception:
            if any(self._alone(item) is not None for item in items):
                raise
            if (dummy := self._dummy_batch()) is None:
                raise
            return dummy  # the function drops all of these samples, and fails on the empty rest
        is_later = partial(self._is_batch_later, batch, kept)
        return CountedBatch(batch, _samples_of(batch, total, len(kept), ids, is_later))

    def _is_batch_later(self, batch: Any, items: list[Any]) -> bool | None:
        """Whether the batch dimension of the tensors is not their first; None if unknown.

        Its length is that of `items`, and 1 in a batch of one item.
        """
        if self._batch_is_later is None:
            with preserve_generator_states():  # the function may draw from them
                batches = (self._alone(item) for item in items)
                single = next((batch for batch in batches if batch is not None), None)
            pairs = [*zip(sizes := [*_sizes(batch, {len(items)})], alone := [*_sizes(single, {1})], strict=False)]
            if len(sizes) != len(alone) or any(len(a) != len(b) for a, b in pairs):
                return None
            of_samples = [(a[1:], b[1:]) for a, b in pairs if a != b]  # other tensors belong to the whole batch
            later = [(len(items), 1) in zip(a, b, strict=True) for a, b in of_samples]
            self._batch_is_later = bool(later) and all(later)
        return self._batch_is_later

    def _alone(self, item: Any) -> Any:
        """The batch of one sample; None if the function raises an error."""
        try:
            return self._collate([item])
        except Exception:
            return None

    def _dummy_batch(self) -> CountedBatch | None:
        for number in range(min(len(self._dataset), MAX_DUMMY_TRIES)):
            if (batch := self._alone(self._dataset[number])) is not None:
                return CountedBatch(batch, 0)
        return None


def _samples_of(batch: Any, total: int, kept: int, ids: set[int], is_batch_later: Callable[[], bool | None]) -> int:
    """The number of samples of a batch; -1 if unknown.

    Args:
        batch: the result of a collate function.
        total: number of its samples.
        kept: number of its samples that are not None.
        ids: their ids.
        is_batch_later: returns whether the batch dimension is not the first; None if unknown.
    """
    if isinstance(batch, (list, tuple)) and any(id(item) in ids for item in batch):  # pyright: ignore
        return len(batch)  # pyright: ignore[reportUnknownArgumentType] - a list of samples
    if isinstance(batch, list) and batch and not any(isinstance(item, (Tensor, list, tuple)) for item in batch):  # pyright: ignore
        return len(batch)  # pyright: ignore[reportUnknownArgumentType] - one object per sample
    sizes = [*_sizes(batch, {total, kept})]
    if kept != 1:  # ignore a number for the whole batch
        sizes = [size for size in sizes if size[0] != 1 or total in size] or sizes
    lengths = {size[0] for size in sizes}
    if not sizes or kept in lengths:
        # more rows than samples: rows of nodes, tokens or views. Fewer: perhaps the remaining samples
        return kept if kept < total or all(size[0] >= total or total in size for size in sizes) else -1
    if all(kept in size for size in sizes):  # perhaps time is the first dimension; or `kept` is a number of features
        later = is_batch_later()
        if later or later is None:
            return kept if later else -1
    return lengths.pop() if len(lengths) == 1 else -1


def _sizes(value: Any, counts: set[int], depth: int = 0) -> Iterator[Size]:
    """The sizes of its tensors, and the lengths of lists with one entry per sample.

    Such a list has one of the lengths `counts`, or contains no tensors. Other lists, and the outermost, contain the
    parts of a sample.
    """
    if isinstance(value, PackedSequence):
        yield (int(value.batch_sizes[0]),)
        return
    if isinstance(value, Tensor):
        if value.ndim:
            yield tuple(value.shape)
        return
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        value = [*value.values()]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    elif not isinstance(value, (list, tuple)):
        return
    elif depth and (len(value) in counts or not any(isinstance(x, (Tensor, list, tuple, Mapping)) for x in value)):  # pyright: ignore
        yield (len(value),)  # pyright: ignore[reportUnknownArgumentType]
        return
    for part in value if depth < 3 else ():  # pyright: ignore[reportUnknownVariableType]
        yield from _sizes(part, counts, depth + 1)
