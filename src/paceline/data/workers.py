"""The worker processes of a data loader: the random numbers of samples, their start and end, and the room they need.

The random augmentation of a sample is seeded by the sample, not by the process that loads it, or by the order. Sample
by sample, all random streams restart for each (epoch, sample). A dataset with torch's hook `__getitems__` returns a
whole micro-batch, and the streams restart for each (epoch, micro-batch). This is the same at every world size, but not
for a different number of virtual ranks, global batch or accumulation.

Workers pass tensors through /dev/shm, each with a file descriptor, and work ahead of the training:

    bytes = bytes of a batch x (2 ahead x processes + 1 in use) x ranks on this machine
    files = tensors of a batch x (2 ahead x processes + 1 in use)
"""

import gc
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    default_collate,
    default_convert,
    get_worker_info,
)  # fmt: skip

from paceline.errors import TrainingError, UsageError
from paceline.host.procfs import die_with_parent
from paceline.nested import batch_size, tensors
from paceline.protocol.control import STOP_SIGNALS
from paceline.protocol.status_page import SLOTS, StatusPage, read_loaders
from paceline.seeding import derive, preserved_streams, seed_streams

SLOTS_OF_A_LOADER = SLOTS // 2  # the loaders of training and evaluation exist at the same time
EXIT_SECONDS = 1.0  # a worker closes its connections before the kernel reports its end
GONE = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([0-9]+).*")  # torch's message for a killed worker
AHEAD = 2  # batches that each process has ready: DataLoader's prefetch_factor
OTHER_FILES = 64  # that a training holds besides
SHARED_MEMORY = "/dev/shm"

Key = tuple[int, int]
"""(epoch, index)"""


# ---- samples -----------------------------------------------------------------------------------------------------


class SeededSamples(Dataset[Any]):
    """`dataset` by (epoch, index): seeds all random streams by them before it draws the sample.

    A worker writes into the box which sample it works on.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, box: StatusPage | None = None, first_slot: int = 0) -> None:
        self._dataset, self._seed = dataset, seed
        self._box, self._first_slot = box, first_slot

    def __getstate__(self) -> dict[str, Any]:
        # a spawned process, other than a forked one, does not have the memory
        return {**self.__dict__, "_box": None}

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        seed_streams(derive(self._seed, "sample", epoch, index))
        return self._drawn(key, lambda: self._dataset[index])

    def _drawn(self, key: Key, draw: Callable[[], Any]) -> Any:
        worker = get_worker_info() if self._box is not None else None
        if self._box is None or worker is None or worker.id >= SLOTS_OF_A_LOADER:
            return draw()
        slot, (epoch, index) = self._first_slot + worker.id, key
        self._box.set_loader(slot, epoch=epoch, item=index, busy=True)
        drawn = draw()
        self._box.set_loader(slot, epoch=epoch, item=index, busy=False)
        return drawn


class SeededBatches(SeededSamples):
    """The same for a dataset that returns whole micro-batches; the box names the first sample."""

    def __getitems__(self, keys: list[Key]) -> Any:
        """A list of samples, to be collated, or `WholeBatch`."""
        indices = [index for _, index in keys]
        seed_streams(derive(self._seed, "samples", keys[0][0], *indices))
        dataset: Any = self._dataset
        items = self._drawn(keys[0], partial(dataset.__getitems__, indices))
        is_whole = isinstance(items, tuple)
        batch: Any = default_convert(items) if is_whole else items
        size = batch_size(batch) if is_whole else len(items)
        if size not in (None, len(indices)):
            raise UsageError(
                code="wrong-number-of-items", dataset=type(self._dataset).__name__, asked=len(indices), size=size
            )
        return WholeBatch(batch) if is_whole else batch


@dataclass(frozen=True)
class WholeBatch:
    """A batch that needs no collating."""

    batch: tuple[Any, ...]


def collated(own: Callable[[list[Any]], Any] | None, samples: Any) -> Any:
    """Samples -> batch, by the task's `own` function or torch's; a whole batch stays as it is."""
    return samples.batch if isinstance(samples, WholeBatch) else (own or default_collate)(samples)


def asks_for_batches(dataset: object) -> bool:
    """Whether `dataset` has a `__getitems__` of its own, or passes it on to one that has."""
    if type(dataset) is Subset:
        return asks_for_batches(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return all(asks_for_batches(part) for part in parts)
    return callable(getattr(dataset, "__getitems__", None))


# ---- start and end -----------------------------------------------------------------------------------------------


def started(loader: DataLoader[Any]) -> Iterator[Any]:
    """An iterator of `loader`; if it still exists when this process ends, its workers are killed then.

    The traceback of an error keeps it, or a variable of the user's. At its end Python would send SIGTERM to the
    workers, which ignore it (see `begin_worker`), and wait for them without end.
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


def begin_worker(trainer_pid: int, worker: int) -> None:
    """Runs first in a worker: the worker ends with the trainer, also if that is killed."""
    die_with_parent(trainer_pid)
    for number in STOP_SIGNALS:  # meant for the trainer, which needs us to end its step, and saves
        signal.signal(number, signal.SIG_IGN)


def _kill(workers: Iterable[BaseProcess], of_iterator: int = 0) -> None:
    with suppress(ValueError):  # torch does not know that iterator any more
        torch._C._remove_worker_pids(of_iterator)  # pyright: ignore[reportPrivateUsage] - or it raises an error
    for worker in workers:
        worker.kill()


@cache
def inherited_frozen_objects() -> bool:
    """Whether a fork gave this process frozen objects (rank/preload.py). Counting 600,000 objects takes 70 ms."""
    return gc.get_freeze_count() > 0


@contextmanager
def without_garbage() -> Generator[None]:
    """Inside, workers can be forked: they never collect garbage of this process.

    An event of CUDA may be such garbage, and if a forked process deletes one, CUDA aborts the process.
    """
    users = inherited_frozen_objects() or gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not users:
            gc.unfreeze()


def drained(iterator: Iterator[Any], box: StatusPage | None) -> Generator[Any]:
    """The batches of a loader's iterator; `box` shows when it is waited for. Random streams do not change."""
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
        del iterator  # ends the workers now, not when the garbage collector reaches it


def _with_signal(error: RuntimeError, iterator: object) -> RuntimeError:
    """`error`, or torch's message for a killed worker if torch has only seen that this worker is gone.

    Which of the two it raises is a race between its handler of SIGCHLD and its look at the processes.
    """
    if "killed by signal" in str(error) or (gone := GONE.search(str(error))) is None:
        return error
    pid, workers = int(gone[1]), getattr(iterator, "_workers", ())
    code = next((worker.exitcode for worker in workers if worker.pid == pid), None)
    if code is None or code >= 0:
        return error
    return RuntimeError(f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-code)}.")


@contextmanager
def naming_lost_processes(box: StatusPage, rank: int) -> Generator[None]:
    """Inside, a killed worker becomes an error that names it, and the sample that it worked on.

    torch raises from its handler of SIGCHLD, at any place of the main thread.

    Raises:
        TrainingError: with torch's own message at the end.
    """
    try:
        try:
            yield
        except ConnectionError:  # a worker may have died
            deadline = time.monotonic() + EXIT_SECONDS
            while time.monotonic() < deadline:
                torch._C._error_if_any_worker_fails()  # pyright: ignore[reportPrivateUsage]
                time.sleep(0.01)
            raise
    except RuntimeError as error:
        gone = GONE.search(str(error))
        if gone is None:
            raise
        pid, item, number = int(gone[1]), "", ""
        if lost := next((worker for worker in read_loaders(box.descriptor) if worker.pid == pid), None):
            doing = "while it loaded" if lost.busy else "after it had loaded"
            item = f", {doing} sample {lost.item} of epoch {lost.epoch + 1}"
            number = f" {lost.number % SLOTS_OF_A_LOADER}"
        raise TrainingError(
            code="loader-process-lost", rank=rank, number=number, pid=pid, item=item, reason=gone[0].strip()
        ) from error


# ---- room --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """The batches that need room on this machine."""

    largest_batch: int
    """samples of the largest micro-batch of the run"""
    num_workers: int
    """worker processes of each rank; without any there is nothing to check"""
    local_ranks: int


def check_room(batch: Any, samples: int, room: Room) -> None:
    """Check before the first step that batches like `batch`, which has `samples` samples, have room.

    Raises:
        UsageError: they have not. Later this looks like a crash of a worker.
    """
    num_workers, local_ranks = room.num_workers, room.local_ranks
    if not num_workers:
        return
    if sys.platform == "linux" and not Path(SHARED_MEMORY).is_dir():
        raise UsageError(code="no-shared-memory", folder=SHARED_MEMORY)
    sizes = [tensor.nbytes for tensor in tensors(batch)]
    batches = AHEAD * num_workers + 1
    needed_bytes = sum(sizes) * room.largest_batch // samples * batches * local_ranks
    free_bytes = _free_bytes()
    if free_bytes is not None and free_bytes < needed_bytes:
        raise UsageError(
            code="shared-memory-too-small", folder=SHARED_MEMORY, free=_mib(free_bytes), num_workers=num_workers,
            local_ranks=local_ranks, needed=_mib(needed_bytes),
        )  # fmt: skip
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed_files = len(sizes) * batches + OTHER_FILES
    if files != resource.RLIM_INFINITY and files < needed_files:
        raise UsageError(code="too-few-open-files", files=files, num_workers=num_workers, needed_files=needed_files)


def _free_bytes() -> int | None:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:  # not Linux: tensors are shared in another way, whose room is not known
        return None
    return status.f_bavail * status.f_frsize


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
