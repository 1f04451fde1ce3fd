"""Seeds a dataset's random augmentation by what is loaded, never by who loads it, or in which order.

Sample by sample, all random streams restart for each (epoch, sample). A dataset with torch's hook `__getitems__` gives
a whole micro-batch, and they restart for each (epoch, micro-batch): the same at every world size, as a virtual rank's
micro-batches are, but not for another number of virtual ranks, global batch or accumulation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import Dataset, StackDataset, Subset, default_collate, default_convert, get_worker_info

from paceline.errors import UsageError
from paceline.nested import batch_size
from paceline.protocol.status_page import SLOTS, StatusPage
from paceline.seeding import derive, seed_streams

SLOTS_OF_A_LOADER = SLOTS // 2  # the loaders of training and evaluation live at the same time

Key = tuple[int, int]
"""(epoch, index)"""


class SeededSamples(Dataset[Any]):
    """`dataset` by (epoch, index): seeds all random streams by them before it draws the sample.

    A worker process writes into the box which sample it works on.
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
    """The same for a dataset that gives whole micro-batches; the box names the first sample."""

    def __getitems__(self, keys: list[Key]) -> Any:
        """A list of samples, to be collated, or `WholeBatch`."""
        indices = [index for _, index in keys]
        seed_streams(derive(self._seed, "samples", keys[0][0], *indices))
        dataset: Any = self._dataset
        found = self._drawn(keys[0], partial(dataset.__getitems__, indices))
        whole = isinstance(found, tuple)
        batch: Any = default_convert(found) if whole else found
        size = batch_size(batch) if whole else len(found)
        if size not in (None, len(indices)):
            raise UsageError(
                code="wrong-number-of-items", dataset=type(self._dataset).__name__, asked=len(indices), size=size
            )
        return WholeBatch(batch) if whole else batch


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
