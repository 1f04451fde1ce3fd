"""Loads the micro-batches of one rank, step by step: from a plan to tensors on the device.

Data held as tensors or arrays is gathered directly; any other map-style dataset goes through torch's DataLoader, with
workers. Either way the samples come in the plan's order, and a sample's random augmentation depends on (seed, epoch,
sample) only, never on the worker that loads it (see `workers` for datasets that return whole batches).

Data that are already on the device of the batches need no more: a batch is gathered there when it is requested. Other
data are loaded for a GPU while the current batches are computed. A step calls `start_batches` when all of its
work is launched: while the GPU is busy, the host loads the batches of the next step into page-locked memory, and starts
their copies on a separate stream. An evaluation does not call it; there the next batch is started before the
current one is returned. On the CPU there is no prefetching.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from msgspec import Struct, structs
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from paceline.data.arrays import GatherFunction, SampleRandomNumbers, batch_gatherer, dataset_arrays
from paceline.data.plan import BatchPlan, MicroBatchPlan, plan_rank_micro_batches
from paceline.data.workers import (
    SLOTS_OF_A_LOADER,
    SampleKey,
    SeededBatchDataset,
    SeededSampleDataset,
    collate_batch,
    has_batched_getitems,
    initialize_worker,
    iterate_loader,
    start_loader,
)  # fmt: skip
from paceline.errors import UsageError
from paceline.nested import map_tensors, tensors
from paceline.protocol.status_page import StatusPage
from paceline.seeding import derive_seed, preserve_generator_states

Item = TypeVar("Item")
CPU = torch.device("cpu")
BatchRequest = tuple[int, Tensor]
"""(epoch, indices (n,)): one micro-batch to fetch."""
LOADED_TO_COMPARE = 128  # samples, to find the largest


class PrefetchTrigger:
    """Starts to load the batches of the next step, when a step calls it."""

    def __init__(self) -> None:
        self.start_batches = do_nothing
        """Start the batches of the next step. Errors appear when a batch is requested."""


def is_stream(data: object) -> bool:
    return isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")


def do_nothing() -> None:
    """Until there are data to load."""


class MicroBatch(Struct, frozen=True):
    """The data of one forward and backward, and its position in the run."""

    inputs: Any
    """The inputs of the model, on the device: a tensor, or tensors in tuples, lists and dicts."""
    targets: Any
    """The targets, for the loss. If the dataset returns dicts, the same dict as `inputs`."""
    work: MicroBatchPlan
    """The samples and the position: epoch, step, virtual rank and number of the micro-batch."""
    random_seed: int
    """The seed of the random stream (e.g. for dropout) in the forward."""
    samples: int | None = None
    """The number of samples, if a collate function may have dropped some; None: those of `work`."""


@dataclass(frozen=True)
class LoadingOptions:
    """How batches are fetched: to this device, by this number of worker processes (0: in the training process)."""

    device: torch.device
    num_workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    """Samples -> batch. None: torch's default_collate; data held as tensors or arrays are gathered instead."""
    page: StatusPage | None = None
    """The worker processes write the index of their current sample there."""
    evaluates: bool = False
    """Whether the batches are for an evaluation. For a GPU, the next batch is then loaded before it is requested."""
    ahead: PrefetchTrigger = field(default_factory=PrefetchTrigger)
    """In training, a step calls it when the batches of the next step can be started."""
    workers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of torch's DataLoader that need worker processes: timeout, prefetch_factor, ..."""
    worker_init_fn: Callable[[int], object] | None = None
    kept_loaders: dict[bool, DataLoader[Any]] | None = None
    """By `evaluates`, the loaders whose worker processes remain after an epoch; None if they end with it."""
    filter_samples: Callable[[list[MicroBatchPlan]], list[MicroBatchPlan]] | None = (
        None  # removes samples from a training step
    )

    def worker_settings(self, seed: int) -> dict[str, Any]:
        """Arguments of DataLoader. With `seed` it does not take the seed of its workers from the global stream.

        Args:
            seed: of the worker processes.
        """
        settings: dict[str, Any] = {"num_workers": self.num_workers, "generator": torch.Generator().manual_seed(seed)}
        if not self.num_workers:
            return settings
        start = partial(initialize_worker, os.getpid(), self.worker_init_fn)
        is_kept = self.kept_loaders is not None
        return {**settings, **self.workers, "worker_init_fn": start, "persistent_workers": is_kept}

    def reuse_or_make_loader(self, make: Callable[[], DataLoader[Any]]) -> DataLoader[Any]:
        """The loader whose worker processes remain from the previous epoch, or a new one.

        Args:
            make: makes a new one.
        """
        if self.kept_loaders is None or not self.num_workers:
            return make()
        if self.evaluates not in self.kept_loaders:
            self.kept_loaders[self.evaluates] = make()
        return self.kept_loaders[self.evaluates]


def load_steps(
    dataset: Dataset[Any], plan: BatchPlan, share: range, loading: LoadingOptions, *, start: int, stop: int,
    merged: bool = False,
) -> Generator[list[MicroBatch]]:  # fmt: skip
    """Yield, for each step start..stop-1 of the run, the micro-batches of the rank with the virtual ranks `share`.

    Args:
        dataset: a map-style dataset of (input, target) pairs or dicts, equal on all ranks.
        plan: which samples each step uses, and the seed of their random augmentations.
        share: the virtual ranks that this rank computes, as a World returns them.
        loading: how batches are fetched, and on which device they are.
        start: the first step, counted from the start of the run, over all epochs.
        stop: the step after the last one.
        merged: whether the k-th micro-batches of all these virtual ranks become one, for synchronised batch norm.

    Yields:
        At least one micro-batch per step. A rank without samples in a step gets a dummy batch, which does not count.

    Raises:
        UsageError: the items of the dataset are neither (input, target) pairs nor dicts.
    """
    steps = (
        plan_rank_micro_batches(plan, *divmod(step, plan.steps_per_epoch), share, merged=merged)
        for step in range(start, stop)
    )
    with closing(load_planned_batches(dataset, steps, plan.seed, loading)) as loaded:
        for step in loaded:
            yield [split_inputs_and_targets(batch) for batch in step]


def load_planned_batches(
    dataset: Dataset[Any], steps: Iterable[list[MicroBatchPlan]], seed: int, loading: LoadingOptions
) -> Generator[list[MicroBatch]]:
    """Yield, for each step, the batches of its work. The inputs have the form that the dataset returns.

    The iterator `steps` may use random numbers. It is advanced here, and not when worker processes get their next
    requests, because random streams are restored there. So it is always ahead of the requests: by one step for each
    batch that worker processes load ahead, and by one for the batches that are started ahead for a GPU. These numbers
    do not depend on the number of micro-batches, which differs between world sizes.
    """
    steps = steps if loading.filter_samples is None or loading.evaluates else map(loading.filter_samples, steps)
    if (gather := _gatherer_in_place(dataset, loading)) is not None:
        for step in steps:
            draws = SampleRandomNumbers(seed, step[0].epoch)
            yield [MicroBatch(gather(work.indices, draws), None, work, work.random_seed(seed)) for work in step]
        return
    steps_ahead = loading.num_workers * (loading.workers.get("prefetch_factor") or 2) + (loading.device.type == "cuda")
    ready, requested, source = deque[list[MicroBatchPlan]](), deque[MicroBatchPlan](), iter(steps)

    def advance() -> None:
        while len(ready) <= steps_ahead and (step := next(source, None)) is not None:
            ready.append(step)
            requested.extend(step)

    def requests() -> Generator[BatchRequest]:
        while requested:
            work = requested.popleft()
            yield work.epoch, work.indices

    def num_next() -> int:
        return len(ready[0]) if ready else 0

    advance()
    with closing(fetch_batches(dataset, requests(), seed, loading, num_next)) as batches:
        while ready:
            step = ready.popleft()
            yield [MicroBatch(next(batches), None, work, work.random_seed(seed)) for work in step]
            advance()


def index_of_largest_sample(dataset: Dataset[Any], seed: int, loading: LoadingOptions) -> int:
    """The index of the sample that probably needs most memory.

    It has the maximum of `dataset.lengths`, if this has one number per sample. Otherwise it has most bytes among
    LOADED_TO_COMPARE evenly spaced samples. Samples of arrays are equally large.
    """
    if loading.collate is None and batch_gatherer(dataset) is not None:
        return 0
    size = len(dataset)  # pyright: ignore[reportArgumentType]
    with suppress(Exception):  # `lengths` may be anything
        if (lengths := torch.as_tensor(getattr(dataset, "lengths", ()))).shape == (size,):
            return int(lengths.argmax())
    candidates = range(0, size, -(-size // LOADED_TO_COMPARE))
    requests = ((0, torch.tensor([index])) for index in candidates)
    with closing(fetch_batches(dataset, requests, seed, replace(loading, num_workers=0, workers={}))) as batches:
        sizes = [sum(tensor.nbytes for tensor in tensors(batch)) for batch in batches]
    return candidates[sizes.index(max(sizes))]


def load_dummy_batch(
    dataset: Dataset[Any], index: int, size: int, plan: BatchPlan, share: range, loading: LoadingOptions
) -> MicroBatch:
    """A micro-batch of `size` times the sample `index`, which does not count."""
    indices, loading = torch.full((size,), index), replace(loading, num_workers=0, workers={}, evaluates=True)
    work = MicroBatchPlan(0, 0, share[0], 0, indices, is_counted=False, global_samples=plan.global_batch)
    with closing(load_planned_batches(dataset, [[work]], plan.seed, loading)) as steps:
        return next(steps)[0]


def load_micro_batch_for_audit(
    dataset: Dataset[Any], loading: LoadingOptions, plan: BatchPlan, epoch: int, step: int, virtual_rank: int
) -> MicroBatch | None:
    """The first micro-batch of any virtual rank in a step, for an audit. It does not count. None without samples."""
    samples = plan.global_indices(epoch, step)
    indices, *_ = plan.microbatches(samples, virtual_rank)
    if not indices.numel():
        return None
    work = MicroBatchPlan(epoch, step, virtual_rank, 0, indices, False, samples.numel(), is_repeated=True)
    loading = replace(loading, num_workers=0, evaluates=True)
    with preserve_generator_states(), closing(load_planned_batches(dataset, [[work]], plan.seed, loading)) as loaded:
        return next(loaded)[0]


def _gatherer_in_place(dataset: Dataset[Any], loading: LoadingOptions) -> GatherFunction | None:
    """Gathers whole batches, if the data are on the device of the batches: then nothing is prefetched or moved."""
    source = dataset.dataset if type(dataset) is Subset else dataset
    rows = dataset_arrays(source) if loading.collate is None else None
    if rows is None or any((row.device if isinstance(row, Tensor) else CPU) != loading.device for row in rows):
        return None
    return batch_gatherer(dataset)


def fetch_inputs_and_targets(
    dataset: Dataset[Any], requests: Iterable[BatchRequest], seed: int, loading: LoadingOptions
) -> Generator[tuple[Any, Any]]:
    """Yield (inputs, targets) on the device for each request, in order.

    Raises:
        UsageError: if the items of the dataset are neither (input, target) pairs nor dicts. A dict is both.
    """
    with closing(fetch_batches(dataset, requests, seed, loading)) as batches:
        for batch in batches:
            yield inputs_and_targets(batch)


def fetch_batches(
    dataset: Dataset[Any], requests: Iterable[BatchRequest], seed: int, loading: LoadingOptions,
    num_next: Callable[[], int] = int,
) -> Generator[Any]:  # fmt: skip
    """Yield the batch for each request on the device, in order and in the form that the dataset returns.

    In training, `num_next` returns the number of batches of the next step.
    """
    if (gather := _gatherer_in_place(dataset, loading)) is not None:
        yield from (gather(indices, SampleRandomNumbers(seed, epoch)) for epoch, indices in requests)
        return
    gather = batch_gatherer(dataset) if loading.collate is None else None
    if gather is not None:
        batches: Generator[Any] = (gather(indices, SampleRandomNumbers(seed, epoch)) for epoch, indices in requests)
    else:
        batches = _by_loader(dataset, requests, seed, loading)
    ahead = None if loading.evaluates else loading.ahead
    with closing(batches), closing(prefetch_to_device(batches, loading.device, ahead, num_next)) as on_device:
        yield from on_device


class _Requests:
    """A batch sampler: iterates over the keys of the samples of each batch, in a task over those of the whole run."""

    keys: Iterable[list[SampleKey]] = ()

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return iter(self.keys)


def _by_loader(
    dataset: Dataset[Any], requests: Iterable[BatchRequest], seed: int, loading: LoadingOptions
) -> Generator[Any]:
    requests = iter(requests)
    first = next(requests, None)
    epoch = 0 if first is None else first[0]

    def make() -> DataLoader[Any]:
        loads_batches = has_batched_getitems(dataset)
        dataset_class = SeededBatchDataset if loads_batches else SeededSampleDataset
        return DataLoader(
            dataset_class(dataset, seed, page, SLOTS_OF_A_LOADER if loading.evaluates else 0),
            batch_sampler=_Requests(), pin_memory=loading.device.type != "cpu",
            collate_fn=partial(collate_batch, loading.collate) if loads_batches else loading.collate,
            **loading.worker_settings(derive_seed(seed, "workers", epoch)),
        )  # fmt: skip

    page = loading.page if loading.num_workers else None
    loader = loading.reuse_or_make_loader(make)
    all_requests = requests if first is None else chain([first], requests)
    sampler: Any = loader.batch_sampler
    sampler.keys = ([(epoch, i) for i in cast("list[int]", indices.tolist())] for epoch, indices in all_requests)
    with closing(iterate_loader(start_loader(loader), page)) as batches:
        yield from batches


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Convert a batch to (inputs, targets); raise UsageError if it is neither a pair nor a dict."""
    if isinstance(batch, Mapping):  # the model and the loss each select the entries that they need
        return batch, batch
    if not isinstance(batch, Sequence) or isinstance(batch, str) or len(batch) != 2:
        kind = type(batch).__name__ + (f" of length {len(batch)}" if isinstance(batch, Sequence) else "")
        raise UsageError(code="not-pairs", kind=kind)
    return batch[0], batch[1]


def split_inputs_and_targets(batch: MicroBatch) -> MicroBatch:
    """The batch with its inputs and targets, which the dataset returns as a pair."""
    inputs, targets = inputs_and_targets(batch.inputs)
    return structs.replace(batch, inputs=inputs, targets=targets)


def prefetch_to_device(
    batches: Iterator[Any], device: torch.device, ahead: PrefetchTrigger | None = None,
    num_next: Callable[[], int] = int,
) -> Generator[Any]:  # fmt: skip
    """Yield `batches` on `device`, in order. `ahead` starts `num_next()` of them during a step, if it is given."""
    if device.type != "cuda":
        for batch in batches:
            yield move_to_device(batch, device)
        return
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # data on the GPU must be complete before they are gathered
    free: list[torch.cuda.Event] = []

    def begin() -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(side):
            batch = move_to_device(next(batches), device)
            arrived = free.pop() if free else torch.cuda.Event()
            arrived.record(side)
        return batch, arrived

    def end(item: tuple[Any, torch.cuda.Event]) -> Any:
        batch, arrived = item
        current_stream = torch.cuda.current_stream(device)
        current_stream.wait_event(arrived)
        free.append(arrived)  # the wait is for what was recorded before it
        for tensor in tensors(batch):  # the side stream must not reuse this memory for the next copy while it is read
            tensor.record_stream(current_stream)
        return batch

    yield from prefetch(begin, end, ahead, num_next)


def prefetch(
    begin: Callable[[], Item], end: Callable[[Item], Any], ahead: PrefetchTrigger | None = None,
    num_next: Callable[[], int] = int,
) -> Generator[Any]:  # fmt: skip
    """Yield `end(item)` for each item that `begin` returns, until it raises StopIteration.

    With `ahead`, its `start_batches` starts items until `num_next()` are started. Others are started when they are
    requested. Without it, each item is started before the previous one is returned. Any other error of `begin` is
    raised when its item is requested.
    """
    queue, errors = deque[Item](), list[Exception]()

    def start_until(count: int) -> None:
        while len(queue) < count and not errors:
            try:
                queue.append(begin())
            except Exception as error:
                errors.append(error)

    def start_batches() -> None:
        start_until(num_next())

    if ahead is not None:
        ahead.start_batches = start_batches
    try:
        while True:
            start_until(1)
            if not queue:
                break
            item = queue.popleft()
            if ahead is None:
                start_until(1)
            yield end(item)
    finally:
        if ahead is not None and ahead.start_batches is start_batches:
            ahead.start_batches = do_nothing
    for error in errors:
        if not isinstance(error, StopIteration):
            raise error


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Move all tensors of `batch` to `device`. For a GPU they are page-locked first, so that the host need not wait."""

    def move(tensor: Tensor) -> Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return map_tensors(batch, move)
