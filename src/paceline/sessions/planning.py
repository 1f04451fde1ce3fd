"""From what a user gives `Session.loader` to the plan of who sees which sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data.plan import BatchPlan, Tail
from paceline.errors import UsageError
from paceline.sessions.existing import check_taken, covers_all, keeps_order, own_collate

Collate = Callable[[list[Any]], Any] | None


def planned(
    data: Dataset[Any] | DataLoader[Any],
    virtual_ranks: int,
    seed: int,
    *,
    global_batch: int | None,
    batch_size: int | None,
    per_rank: bool,
    accumulation: int,
    shuffle: bool | None,
    tail: Tail,
    num_workers: int,
    collate: Collate,
) -> tuple[Any, BatchPlan, DataLoader[Any] | None, int, Collate]:
    """(dataset, plan, the DataLoader whose own order counts, loader processes, collate function); see `Session.loader`.

    Raises:
        UsageError: for what cannot be shared out.
    """
    existing: DataLoader[Any] | None = None
    dataset: Any = data
    if isinstance(data, DataLoader):
        check_taken(data)
        given = {"shuffle": shuffle, "num_workers": num_workers or None, "collate": collate,
                 "global_batch": global_batch, "batch_size": batch_size}  # fmt: skip
        if twice := [name for name, value in given.items() if value is not None]:
            raise UsageError(f"s.loader(DataLoader, {twice[0]}=...): the DataLoader says that already")
        existing, dataset = data, data.dataset
        num_workers, collate = data.num_workers, own_collate(data)
        batch = data.batch_size or max(len(dataset) // max(1, len(data)), 1)
        global_batch = batch * virtual_ranks * accumulation if per_rank else batch
        if per_rank:
            if data.batch_size is None or not covers_all(data):
                raise UsageError("s.loader(DataLoader, per_rank=True): its sampler has an order of its own")
            existing, shuffle = None, not keeps_order(data)
        tail = "drop" if data.drop_last or not covers_all(data) else tail
    elif isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        raise UsageError(f"s.loader takes a map-style dataset or a DataLoader, not a {type(data).__name__}")
    if (global_batch is None) == (batch_size is None):
        raise UsageError("s.loader(dataset, ...) needs one of global_batch= and batch_size=")
    size: int = len(dataset)
    if size == 0:
        raise UsageError("s.loader: the dataset is empty")
    batch = global_batch or (batch_size or 0) * virtual_ranks * accumulation
    plan = BatchPlan(size, batch, virtual_ranks, accumulation, seed, shuffle is not False, tail)
    return dataset, plan, existing, num_workers, collate
