"""Loads the micro-batches of one rank, step by step: from a plan to tensors on the device.

Data held as tensors or arrays is gathered directly; any other map-style dataset goes through torch's DataLoader, with
workers. Either way the samples come in the plan's order, and a sample's random augmentation depends on (seed, epoch,
sample) only, never on the worker that loads it (see `workers` for datasets that return whole batches).

On a GPU the next batches are loaded while the current ones are computed. A step calls `Prefetch.begin` when all of its
work is launched: while the GPU is busy, the host loads the same number of batches into page-locked memory, and begins
their copies on a separate stream. In an evaluation, which does not call it, one batch is begun before the one
in front of it is returned. On the CPU nothing is done ahead.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from paceline.data.arrays import Gather, SampleDraws, batch_gatherer, held_rows
from paceline.data.plan import BatchPlan, Work, rank_work
from paceline.data.workers import (
    SLOTS_OF_A_LOADER,
    SeededBatches,
    SeededSamples,
    asks_for_batches,
    begin_worker,
    collated,
    drained,
    started,
)  # fmt: skip
from paceline.errors import UsageError
from paceline.nested import mapped, tensors
from paceline.protocol.status_page import StatusPage

Begun = TypeVar("Begun")
Request = tuple[int, Tensor]
"""(epoch, indices (n,)): one micro-batch to fetch."""


class Prefetch:
    """A step calls it to begin the batches of the next step."""

    def __init__(self) -> None:
        self.taken = 0
        """batches that were returned since the last `begin`"""
        self.more: Callable[[], object] = lambda: None
        """begins one more, of the data in use"""

    def begin(self) -> None:
        """Begin one batch for each returned since the last time; an error is raised when its batch is due."""
        count, self.taken = self.taken, 0
        for _ in range(count):
            self.more()


class MicroBatch(NamedTuple):
    """What one forward and backward work on, and where in the run it belongs."""

    inputs: Any
    targets: Any
    work: Work
    random_seed: int
    samples: int | None = None
    """how many samples it has, if a collate function may have left some out; None: those of `work`"""


@dataclass(frozen=True)
class Loading:
    """How batches are fetched: onto this device, by this number of worker processes (0 = by the training process)."""

    device: torch.device
    num_workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    box: StatusPage | None = None
    """where the worker processes write which sample they work on"""
    evaluates: bool = False
    ahead: Prefetch = field(default_factory=Prefetch)
    """in training: a step calls it when the batches of the next one can be begun"""
    workers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """settings of torch's DataLoader for these processes, if there are any: timeout, prefetch_factor, ..."""


def load_steps(
    dataset: Dataset[Any],
    plan: BatchPlan,
    share: range,
    loading: Loading,
    *,
    start: int,
    stop: int,
    merged: bool = False,
) -> Generator[list[MicroBatch]]:
    """For each step start..stop-1 of the run: the micro-batches of the rank that owns the virtual ranks `share`."""
    steps = (rank_work(plan, *divmod(step, plan.steps_per_epoch), share, merged=merged) for step in range(start, stop))
    with closing(load_work(dataset, steps, plan.seed, loading)) as loaded:
        for step in loaded:
            yield [MicroBatch(*as_pair(batch), work, work.random_seed(plan.seed)) for batch, work in step]


def load_work(
    dataset: Dataset[Any], steps: Iterable[list[Work]], seed: int, loading: Loading
) -> Generator[list[tuple[Any, Work]]]:
    """For each step the batches of its work, as the dataset gives them.

    `steps` may draw random numbers. So they are drawn here, and not while worker processes get their next requests,
    when random streams are put back.
    """
    if (gather := _gatherer_on_cpu(dataset, loading)) is not None:
        for step in steps:
            yield [(gather(work.indices, SampleDraws(seed, work.epoch)), work) for work in step]
        return
    prefetched = loading.num_workers * (loading.workers.get("prefetch_factor") or 2)
    drawn, requested, source = deque[list[Work]](), deque[Work](), iter(steps)

    def draw() -> None:
        while len(drawn) <= prefetched and (step := next(source, None)) is not None:
            drawn.append(step)
            requested.extend(step)

    def requests() -> Generator[Request]:
        while requested:
            work = requested.popleft()
            yield work.epoch, work.indices

    draw()
    with closing(fetch_batches(dataset, requests(), seed, loading)) as batches:
        while drawn:
            step = drawn.popleft()
            yield [(next(batches), work) for work in step]
            draw()


def _gatherer_on_cpu(dataset: Dataset[Any], loading: Loading) -> Gather | None:
    """Gathers whole batches, if they come from memory and stay on the CPU: then nothing is prefetched or moved."""
    if loading.collate is not None or loading.device.type != "cpu":
        return None
    rows = held_rows(dataset.dataset if type(dataset) is Subset else dataset)
    if rows is None or any(isinstance(one, Tensor) and one.device != loading.device for one in rows):
        return None
    return batch_gatherer(dataset)


def fetch(
    dataset: Dataset[Any], requests: Iterable[Request], seed: int, loading: Loading
) -> Generator[tuple[Any, Any]]:
    """(inputs, targets) on the device for each request, in order.

    Raises:
        UsageError: if the dataset's items are neither (input, target) pairs nor dicts, which are both.
    """
    with closing(fetch_batches(dataset, requests, seed, loading)) as batches:
        for batch in batches:
            yield as_pair(batch)


def fetch_batches(dataset: Dataset[Any], requests: Iterable[Request], seed: int, loading: Loading) -> Generator[Any]:
    """The batch for each request on the device, in order, as the dataset gives it."""
    gather = batch_gatherer(dataset) if loading.collate is None else None
    if gather is not None:
        batches: Generator[Any] = (gather(indices, SampleDraws(seed, epoch)) for epoch, indices in requests)
    else:
        batches = _by_loader(dataset, requests, seed, loading)
    ahead = None if loading.evaluates else loading.ahead
    with closing(batches), closing(on_its_way(batches, loading.device, ahead)) as there:
        yield from there


def _by_loader(dataset: Dataset[Any], requests: Iterable[Request], seed: int, loading: Loading) -> Generator[Any]:
    keys = ([(epoch, i) for i in cast("list[int]", indices.tolist())] for epoch, indices in requests)
    box = loading.box if loading.num_workers else None
    whole = asks_for_batches(dataset)
    seeded = SeededBatches if whole else SeededSamples
    loader = DataLoader(
        seeded(dataset, seed, box, SLOTS_OF_A_LOADER if loading.evaluates else 0),
        batch_sampler=keys,  # the whole run is one pass, so workers prefetch across epochs
        num_workers=loading.num_workers,
        collate_fn=partial(collated, loading.collate) if whole else loading.collate,
        pin_memory=loading.device.type != "cpu",
        worker_init_fn=partial(begin_worker, os.getpid()) if loading.num_workers else None,
        generator=torch.Generator().manual_seed(0),  # else DataLoader draws its base seed from the global stream
        **(loading.workers if loading.num_workers else {}),
    )
    with closing(drained(started(loader), box)) as batches:
        yield from batches


def as_pair(batch: Any) -> tuple[Any, Any]:
    """A batch as (inputs, targets); UsageError if it is none."""
    if isinstance(batch, Mapping):  # the model and the loss each take from it what they need
        return batch, batch
    if not isinstance(batch, Sequence) or isinstance(batch, str) or len(batch) != 2:
        kind = type(batch).__name__ + (f" of length {len(batch)}" if isinstance(batch, Sequence) else "")
        raise UsageError(code="not-pairs", kind=kind)
    return batch[0], batch[1]


def on_its_way(batches: Iterator[Any], device: torch.device, ahead: Prefetch | None = None) -> Generator[Any]:
    """`batches` on `device`, in order; a step begins them by `ahead`, if there is one."""
    if device.type != "cuda":
        for batch in batches:
            yield moved(batch, device)
        return
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # data on the GPU must be there before they are gathered

    def begin() -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(side):
            batch = moved(next(batches), device)
            arrived = torch.cuda.Event()
            arrived.record(side)
        return batch, arrived

    def end(begun: tuple[Any, torch.cuda.Event]) -> Any:
        batch, arrived = begun
        current = torch.cuda.current_stream(device)
        current.wait_event(arrived)
        for tensor in tensors(batch):  # the side stream must not reuse this memory for the next copy while it is read
            tensor.record_stream(current)
        return batch

    yield from one_ahead(begin, end, ahead)


def one_ahead(begin: Callable[[], Begun], end: Callable[[Begun], Any], ahead: Prefetch | None = None) -> Generator[Any]:
    """`end(begun)` for each thing that `begin` returns, until that raises StopIteration.

    Things are begun by `ahead`, or when they are due; without it one is begun before the previous one is returned. Any
    different error of `begin` is raised when that thing is requested, not with the one before it.
    """
    waiting, failed = deque[Begun](), list[Exception]()

    def more() -> None:
        if not failed:
            try:
                waiting.append(begin())
            except Exception as error:
                failed.append(error)

    if ahead is not None:
        ahead.more = more
    try:
        while True:
            if not waiting:
                more()
            if not waiting:
                break
            begun = waiting.popleft()
            if ahead is None:
                more()
            else:
                ahead.taken += 1
            yield end(begun)
    finally:
        if ahead is not None and ahead.more is more:
            ahead.more, ahead.taken = (lambda: None), 0
    for error in failed:
        if not isinstance(error, StopIteration):
            raise error


def moved(batch: Any, device: torch.device) -> Any:
    """`batch` with all its tensors on `device`; to a GPU from page-locked memory, or the host would wait for it."""

    def there(tensor: Tensor) -> Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return mapped(batch, there)
