"""Loads the micro-batches of one rank, step by step: from a plan to tensors on the device.

Data held as tensors or arrays is gathered directly; any other map-style dataset goes through torch's DataLoader, with
workers. Either way the samples come in the plan's order, and a sample's random augmentation depends on (seed, epoch,
sample) only, never on the worker that loads it (see `seeded` for datasets that give whole batches).
"""

import gc
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from signal import strsignal
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.data.ahead import Prefetch, on_its_way
from paceline.data.arrays import batch_gatherer
from paceline.data.draws import SampleDraws
from paceline.data.plan import BatchPlan, Work, rank_work
from paceline.data.seeded import SLOTS_OF_A_LOADER, SeededBatches, SeededSamples, asks_for_batches, collated
from paceline.errors import TrainingError, UsageError
from paceline.host.procfs import die_with_parent
from paceline.protocol.control import STOP_SIGNALS
from paceline.protocol.status_page import StatusPage, read_loaders
from paceline.seeding import preserved_streams

EXIT_SECONDS = 1.0  # a loader process closes its connections before the kernel reports that it ended
GONE = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([0-9]+).*")  # torch's words for a process that was killed

Request = tuple[int, Tensor]
"""(epoch, indices (n,)): one micro-batch to fetch."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward work on, and where in the run it belongs."""

    inputs: Any
    targets: Any
    work: Work
    random_seed: int
    samples: int | None = None
    """how many samples it has, if a collate function may have left some out; None: those of `work`"""


@dataclass(frozen=True)
class Loading:
    """How batches are fetched: onto this device, by so many worker processes (0 = by the training process)."""

    device: torch.device
    num_workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    box: StatusPage | None = None
    """where the worker processes write which sample they work on"""
    evaluates: bool = False
    ahead: Prefetch = field(default_factory=Prefetch)
    """in training: where a step says that the next one's batches can be begun"""
    workers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """settings of torch's DataLoader for these processes, where there are any: timeout, prefetch_factor, ..."""


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

    `steps` may draw random numbers. So they are drawn here, and not where processes are given their next requests, in
    whose midst random streams are put back.
    """
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


def started(loader: DataLoader[Any]) -> Iterator[Any]:
    """An iterator of `loader`; if it is still there when this process ends, its worker processes are killed then.

    An error's traceback keeps it, or a variable of the user's. Python's end would send SIGTERM to the workers, which
    ignore it (see `begin_worker`), and wait for them for ever.
    """
    others = {*active_children()}
    try:
        with without_garbage():
            iterator = iter(loader)
    except BaseException:  # some may have been started
        _kill({*active_children()} - others)
        raise
    workers: Sequence[Any] = getattr(iterator, "_workers", ())
    for worker in workers:  # torch does this to one that is still busy some seconds after a loop was left
        worker.terminate = partial(os.kill, worker.pid, signal.SIGKILL)
    if workers:
        Finalize(iterator, _kill, (workers, id(iterator)), exitpriority=0)
    return iterator


def _kill(workers: Iterable[BaseProcess], of_iterator: int = 0) -> None:
    with suppress(ValueError):  # torch knows none of that iterator any more
        torch._C._remove_worker_pids(of_iterator)  # pyright: ignore[reportPrivateUsage] - or it raises an error
    for worker in workers:
        worker.kill()


@cache
def inherited_frozen_objects() -> bool:
    """Whether a fork gave this process frozen objects (rank/preload.py). Counting 600,000 objects takes 70 ms."""
    return gc.get_freeze_count() > 0


@contextmanager
def without_garbage() -> Generator[None]:
    """Inside, loader processes can be forked: what is garbage here is never collected there.

    An event of CUDA is such garbage now and then, and where a forked process deletes one, CUDA aborts the process.
    """
    users = inherited_frozen_objects() or gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not users:
            gc.unfreeze()


def drained(iterator: Iterator[Any], box: StatusPage | None) -> Generator[Any]:
    """What a loader's iterator gives; `box` is told while it is waited for. What it draws changes no random stream."""
    try:
        while True:
            with preserved_streams():  # without workers, samples are drawn, and seeded, in this very process
                if box is not None:
                    box.put("loading", 1)
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                except RuntimeError as error:
                    raise _with_signal(error, iterator) from error
                finally:
                    if box is not None:
                        box.put("loading", 0)
            yield batch
    finally:
        del iterator  # ends the worker processes now, not when the garbage collector gets to it


def _with_signal(error: RuntimeError, iterator: object) -> RuntimeError:
    """`error`; where torch has only seen that a killed process is gone, its words for one that was killed instead.

    Which of the two it raises is a race between its handler of SIGCHLD and its look at the processes.
    """
    found = GONE.search(str(error))
    workers: Sequence[Any] = getattr(iterator, "_workers", ())
    code = next((w.exitcode for w in workers if found and w.pid == int(found[1])), None)
    if code is None or code >= 0 or "killed by signal" in str(error):
        return error
    return RuntimeError(f"DataLoader worker (pid {found[1] if found else 0}) is killed by signal: {strsignal(-code)}.")


@contextmanager
def naming_lost_processes(box: StatusPage, rank: int) -> Generator[None]:
    """Inside, a killed loader process becomes an error that names it, and what it worked on.

    torch raises in the middle of whatever the main thread does, from its handler of SIGCHLD.

    Raises:
        TrainingError: with torch's own words at the end.
    """
    try:
        try:
            yield
        except ConnectionError:  # a loader process may be the one that died
            deadline = time.monotonic() + EXIT_SECONDS
            while time.monotonic() < deadline:
                torch._C._error_if_any_worker_fails()  # pyright: ignore[reportPrivateUsage]
                time.sleep(0.01)
            raise
    except RuntimeError as error:
        found = GONE.search(str(error))
        if found is None:
            raise
        lost = next((one for one in read_loaders(box.descriptor) if one.pid == int(found[1])), None)
        doing = "while it loaded" if lost and lost.busy else "after it had loaded"
        item = f", {doing} sample {lost.item} of epoch {lost.epoch + 1}" if lost else ""
        number = f" {lost.number % SLOTS_OF_A_LOADER}" if lost else ""
        raise TrainingError(
            code="loader-process-lost", rank=rank, number=number, pid=int(found[1]), item=item, reason=found[0].strip()
        ) from error


def begin_worker(trainer_pid: int, worker: int) -> None:
    """Runs first in a loader worker: the worker ends with the trainer, however that ends."""
    die_with_parent(trainer_pid)
    for number in STOP_SIGNALS:  # meant for the trainer, which needs us to end its step, and saves
        signal.signal(number, signal.SIG_IGN)


def as_pair(batch: Any) -> tuple[Any, Any]:
    """A batch as (inputs, targets); UsageError if it is none."""
    if isinstance(batch, Mapping):  # the model and the loss each take from it what they need
        return batch, batch
    if not isinstance(batch, Sequence) or isinstance(batch, str) or len(batch) != 2:
        kind = type(batch).__name__ + (f" of length {len(batch)}" if isinstance(batch, Sequence) else "")
        raise UsageError(code="not-pairs", kind=kind)
    return batch[0], batch[1]
