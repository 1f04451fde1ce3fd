"""The worker processes of a data loader: random numbers of samples, start and end, and shared memory.

The random augmentation of a sample depends on the sample, not on the process that loads it, nor on the order. All
random streams are seeded for each (epoch, sample). A dataset with torch's hook `__getitems__` returns a whole
micro-batch, so the streams are seeded for each (epoch, micro-batch). The result is the same at every world size, but
differs if the number of virtual ranks, the global batch or the accumulation changes.

Workers pass tensors through /dev/shm, with one file descriptor each, and prefetch batches:

    bytes = bytes of a batch x (2 ahead x processes + 1 in use) x ranks on this machine
    files = tensors of a batch x (2 ahead x processes + 1 in use)
"""

import gc
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
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
from torch.utils.data._utils import worker as torch_worker

from paceline.errors import TrainingError, UsageError
from paceline.host.procfs import die_with_parent
from paceline.nested import batch_size, tensors
from paceline.protocol.control import STOP_SIGNALS
from paceline.protocol.status_page import SLOTS, StatusPage, read_loader_workers
from paceline.seeding import derive_seed, preserve_generator_states, seed_generators

SLOTS_OF_A_LOADER = SLOTS // 2  # the loaders of training and evaluation exist at the same time
WORKER_EXIT_WAIT_SECONDS = 1.0  # a worker closes its connections shortly before the kernel reports its end
LOST_WORKER_PATTERN = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([0-9]+).*")  # torch's message for a killed worker
PREFETCH_FACTOR = 2  # batches that each process has ready: DataLoader's prefetch_factor
NUM_OTHER_OPEN_FILES = 64  # other open files of a training process
SHARED_MEMORY_FOLDER = "/dev/shm"

SampleKey = tuple[int, int]  # (epoch, index)


# ---- samples -----------------------------------------------------------------------------------------------------


class SeededSampleDataset(Dataset[Any]):
    """A dataset with (epoch, index) keys. It seeds all random streams with the key before it loads the sample.

    A worker process writes its current sample to the status page `page`.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, page: StatusPage | None = None, first_slot: int = 0) -> None:
        self.source, self._seed = dataset, seed
        self._page, self._first_slot = page, first_slot

    def __getstate__(self) -> dict[str, Any]:
        # a spawned process does not share the memory of the status page
        return {**self.__dict__, "_page": None}

    def __getitem__(self, key: SampleKey) -> Any:
        epoch, index = key
        seed_generators(derive_seed(self._seed, "sample", epoch, index))
        return self._drawn(key, lambda: self.source[index])

    def _drawn(self, key: SampleKey, draw: Callable[[], Any]) -> Any:
        worker = get_worker_info() if self._page is not None else None
        if self._page is None or worker is None or worker.id >= SLOTS_OF_A_LOADER:
            return draw()
        slot, (epoch, index) = self._first_slot + worker.id, key
        self._page.set_loader(slot, epoch=epoch, item=index, busy=True)
        drawn = draw()
        self._page.set_loader(slot, epoch=epoch, item=index, busy=False)
        return drawn


class SeededBatchDataset(SeededSampleDataset):
    """The same for a dataset that returns whole micro-batches. The status page has the first sample of each."""

    def __getitems__(self, keys: list[SampleKey]) -> Any:
        """Return a list of samples to collate, or a CollatedBatch."""
        indices = [index for _, index in keys]
        seed_generators(derive_seed(self._seed, "samples", keys[0][0], *indices))
        dataset: Any = self.source
        items = self._drawn(keys[0], partial(dataset.__getitems__, indices))
        is_whole = isinstance(items, tuple)
        batch: Any = default_convert(items) if is_whole else items
        size = batch_size(batch) if is_whole else len(items)
        if size not in (None, len(indices)):
            name = type(self.source).__name__
            raise UsageError(code="wrong-number-of-items", dataset=name, asked=len(indices), size=size)
        return CollatedBatch(batch) if is_whole else batch


@dataclass(frozen=True)
class CollatedBatch:
    batch: tuple[Any, ...]


def collate_batch(collate: Callable[[list[Any]], Any] | None, samples: Any) -> Any:
    """Collate samples with the task's function, or with torch's if it is None. A CollatedBatch is already collated."""
    return samples.batch if isinstance(samples, CollatedBatch) else (collate or default_collate)(samples)


def has_batched_getitems(dataset: object) -> bool:
    """Whether `dataset` has `__getitems__`, or wraps only datasets that have it."""
    if type(dataset) is Subset:
        return has_batched_getitems(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return all(has_batched_getitems(part) for part in parts)
    return callable(getattr(dataset, "__getitems__", None))


# ---- start and end -----------------------------------------------------------------------------------------------


def start_loader(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator of `loader`. If it still exists when this process ends, its workers are killed.

    The traceback of an error, or a variable of the user, can keep the iterator alive. At its end Python would send
    SIGTERM to the workers, which ignore it (see `initialize_worker`), and wait for them forever.
    """
    children_before, kept = {*active_children()}, getattr(loader, "_iterator", None)  # that of persistent workers
    gc_was_enabled = gc.isenabled()
    gc.disable()  # until `initialize_worker` has frozen the objects of this process
    try:
        iterator = iter(loader)
    except BaseException:  # some workers may have started
        _kill({*active_children()} - children_before)
        raise
    finally:
        if gc_was_enabled:
            gc.enable()
    if iterator is kept:
        return iterator
    workers: Sequence[Any] = getattr(iterator, "_workers", ())
    for worker in workers:  # torch calls `terminate` if a worker is still busy some seconds after the end of a loop
        worker.terminate = partial(os.kill, worker.pid, signal.SIGKILL)
    if workers:
        Finalize(iterator, _kill, (workers, id(iterator)), exitpriority=0)
    return iterator


def initialize_worker(trainer_pid: int, worker_init_fn: Callable[[int], object] | None, worker: int) -> None:
    """Initialize a worker: it ends together with the training process, even if that process is killed.

    `get_worker_info()` has the user's dataset, here and in the code of the user. The worker never collects garbage of
    the training process: that can contain CUDA events, and CUDA aborts a forked process that deletes one.
    """
    gc.freeze()
    gc.enable()
    die_with_parent(trainer_pid)
    for number in STOP_SIGNALS:  # the training process handles them, and needs its workers to finish the step
        signal.signal(number, signal.SIG_IGN)
    info: Any = get_worker_info()
    source = info.dataset.source
    torch_worker._worker_info = type(info)(id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=source)  # pyright: ignore[reportPrivateUsage]
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _kill(workers: Iterable[BaseProcess], of_iterator: int = 0) -> None:
    with suppress(ValueError):  # torch has already removed this iterator
        torch._C._remove_worker_pids(of_iterator)  # pyright: ignore[reportPrivateUsage] - or it raises an error
    for worker in workers:
        worker.kill()


def iterate_loader(iterator: Iterator[Any], page: StatusPage | None) -> Generator[Any]:
    """Yield the batches of a loader's iterator, without changes to random streams. `page` shows the waiting time."""
    try:
        while True:
            with preserve_generator_states():  # without workers, this process loads the samples and seeds the streams
                if page is not None:
                    page.put("loading", 1)
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                except RuntimeError as error:
                    raise _with_signal(error, iterator) from error
                finally:
                    if page is not None:
                        page.put("loading", 0)
            yield batch
    finally:
        del iterator  # ends the workers now, not at the next garbage collection


def _with_signal(error: RuntimeError, iterator: object) -> RuntimeError:
    """Return `error`, or an error with the signal if torch has only detected that a worker is gone.

    torch raises either error, depending on whether its SIGCHLD handler or its check of the processes comes first.
    """
    if "killed by signal" in str(error) or (match := LOST_WORKER_PATTERN.search(str(error))) is None:
        return error
    pid, workers = int(match[1]), getattr(iterator, "_workers", ())
    exit_code = next((worker.exitcode for worker in workers if worker.pid == pid), None)
    if exit_code is None or exit_code >= 0:
        return error
    return RuntimeError(f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-exit_code)}.")


@contextmanager
def explain_lost_workers(page: StatusPage, rank: int) -> Generator[None]:
    """Convert the error about a killed worker to one that names the worker and its last sample.

    torch raises it from its SIGCHLD handler, so it can appear anywhere in the main thread.

    Raises:
        TrainingError: with torch's message at the end.
    """
    try:
        try:
            yield
        except ConnectionError:  # a worker may have died
            deadline = time.monotonic() + WORKER_EXIT_WAIT_SECONDS
            while time.monotonic() < deadline:
                torch._C._error_if_any_worker_fails()  # pyright: ignore[reportPrivateUsage]
                time.sleep(0.01)
            raise
    except RuntimeError as error:
        match = LOST_WORKER_PATTERN.search(str(error))
        if match is None:
            raise
        pid, item, number = int(match[1]), "", ""
        if lost := next((worker for worker in read_loader_workers(page.descriptor) if worker.pid == pid), None):
            doing = "while it loaded" if lost.busy else "after it had loaded"
            item = f", {doing} sample {lost.item} of epoch {lost.epoch + 1}"
            number = f" {lost.number % SLOTS_OF_A_LOADER}"
        raise TrainingError(
            code="loader-process-lost", rank=rank, number=number, pid=pid, item=item, reason=match[0].strip(" .")
        ) from error


# ---- shared memory -----------------------------------------------------------------------------------------------


def check_shared_memory_size(
    batch: Any, samples: int, *, largest_batch: int, num_workers: int, local_ranks: int
) -> None:
    """Check before the first step that shared memory is sufficient for batches like `batch` of `samples` samples.

    `largest_batch` is the number of samples in the largest micro-batch of the run.
    """
    if not num_workers:
        return
    if not Path(SHARED_MEMORY_FOLDER).is_dir():
        raise UsageError(code="no-shared-memory", folder=SHARED_MEMORY_FOLDER)
    sizes = [tensor.nbytes for tensor in tensors(batch)]
    batches = PREFETCH_FACTOR * num_workers + 1
    needed_bytes = sum(sizes) * largest_batch // samples * batches * local_ranks
    free_bytes = shutil.disk_usage(SHARED_MEMORY_FOLDER).free
    if free_bytes < needed_bytes:
        raise UsageError(
            code="shared-memory-too-small", folder=SHARED_MEMORY_FOLDER, free=_mib(free_bytes), num_workers=num_workers,
            local_ranks=local_ranks, needed=_mib(needed_bytes),
        )  # fmt: skip
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed_files = len(sizes) * batches + NUM_OTHER_OPEN_FILES
    if files != resource.RLIM_INFINITY and files < needed_files:
        raise UsageError(code="too-few-open-files", files=files, num_workers=num_workers, needed_files=needed_files)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
