"""From a plan to tensors on the device: the micro-batches of one rank, step by step.

Data held as tensors is gathered directly; any other map-style dataset goes through torch's DataLoader, with workers.
Either way the samples come in the plan's order, and a sample's random augmentation depends on (seed, epoch, sample)
only, never on the worker that loads it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import tee
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.data.arrays import batch_gatherer
from paceline.data.plan import BatchPlan, Work, rank_work
from paceline.errors import UsageError
from paceline.launch.orders import STOP_SIGNALS
from paceline.launch.worker.attach import die_with_parent
from paceline.seeding import derive, preserved_streams, seed_streams

Request = tuple[int, Tensor]
"""(epoch, indices (n,)): one micro-batch to fetch."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward work on, and where in the run it belongs."""

    inputs: Any
    targets: Any
    work: Work
    random_seed: int


@dataclass(frozen=True)
class Loading:
    """How batches are fetched: on this device, by so many worker processes (0 = by the training process)."""

    device: torch.device
    num_workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None


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
    steps = ([*_work_of(plan, share, step, merged)] for step in range(start, stop))
    for_requests, for_steps = tee(steps)
    requests = ((work.epoch, work.indices) for step in for_requests for work in step)
    with closing(fetch(dataset, requests, plan.seed, loading)) as batches:
        for step in for_steps:
            yield [MicroBatch(*next(batches), work, work.random_seed(plan.seed)) for work in step]


def _work_of(plan: BatchPlan, share: range, step: int, merged: bool) -> list[Work]:
    return rank_work(plan, *divmod(step, plan.steps_per_epoch), share, merged=merged)


def fetch(
    dataset: Dataset[Any], requests: Iterable[Request], seed: int, loading: Loading
) -> Generator[tuple[Any, Any]]:
    """(inputs, targets) on the device for each request, in order.

    Raises:
        UsageError: if the dataset's items are not (input, target) pairs.
    """
    gather = batch_gatherer(dataset) if loading.collate is None else None
    if gather is not None:
        for _, indices in requests:
            yield _as_pair(_move(gather(indices), loading.device))
        return
    for batch in _sample_by_sample(dataset, requests, seed, loading):
        yield _as_pair(_move(batch, loading.device))


def _sample_by_sample(
    dataset: Dataset[Any], requests: Iterable[Request], seed: int, loading: Loading
) -> Generator[Any]:
    keys = ([(epoch, i) for i in cast("list[int]", indices.tolist())] for epoch, indices in requests)
    loader = DataLoader(
        _SeededSamples(dataset, seed),
        batch_sampler=_Keys(keys),
        num_workers=loading.num_workers,
        collate_fn=loading.collate,
        pin_memory=loading.device.type == "cuda",
        worker_init_fn=_WorkerInit(os.getpid()) if loading.num_workers else None,
        generator=torch.Generator().manual_seed(0),  # else DataLoader draws its base seed from the global stream
    )
    iterator = iter(loader)
    try:
        while True:
            with preserved_streams():  # without workers the samples are drawn, and seeded, in this very process
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch
    finally:
        del iterator, loader  # ends the worker processes now, not when the garbage collector gets to it


class _Keys:
    """A batch sampler over an iterator: the whole run is one pass, so workers prefetch across epochs."""

    def __init__(self, keys: Iterator[list[tuple[int, int]]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._keys


class _SeededSamples(Dataset[Any]):
    """`dataset`, asked for (epoch, index): seeds all random streams by them before it draws the sample."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed_streams(derive(self._seed, "sample", epoch, index))
        return self._dataset[index]


@dataclass(frozen=True)
class _WorkerInit:
    """Runs first in a loader worker: end with the trainer, however that ends, and leave the cores to it."""

    trainer_pid: int

    def __call__(self, worker: int) -> None:
        die_with_parent(self.trainer_pid)
        for number in STOP_SIGNALS:  # meant for the trainer, which ends its step and saves; it needs us for that
            signal.signal(number, signal.SIG_IGN)


def _as_pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, Sequence) or isinstance(batch, str) or len(batch) != 2:
        kind = type(batch).__name__ + (f" of length {len(batch)}" if isinstance(batch, Sequence) else "")
        raise UsageError(
            f"the dataset must give (input, target) pairs; a batch of it is a {kind}. Either part may be a tensor, "
            "or a tuple or dict of tensors: return ((a, b), target) rather than (a, b, target)."
        )
    return batch[0], batch[1]


def _move(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_move(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return [_move(value, device) for value in batch]
    return batch
