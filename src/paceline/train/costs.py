"""What a run costs beside computing, over all ranks, reported at its end: time waiting for data, and memory."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.collectives.control import all_gather_object
from paceline.compute.resources import peak_memory
from paceline.data.arrays import batch_gatherer
from paceline.data.workers import asks_for_batches
from paceline.host.cgroup import usable_cores
from paceline.rank.world import World
from paceline.runs.summary import Summary

if TYPE_CHECKING:
    from paceline.train.prepare import Parts

WARM_UP_STEPS = 5  # the first batches wait for loader processes to start
WORTH_TELLING = 0.1


class Waiting:
    """The part of the steps' time spent waiting for data. The first steps count only if there are few."""

    def __init__(self) -> None:
        self._steps: int = 0
        self._first = [0.0, 0.0]  # seconds of data, of all
        self._later = [0.0, 0.0]

    def step(self, data_seconds: float, seconds: float) -> None:
        """Add a step of `seconds`, `data_seconds` of them spent waiting for its data."""
        self._steps += 1
        kept = self._first if self._steps <= WARM_UP_STEPS else self._later
        kept[0] += data_seconds
        kept[1] += seconds

    def share(self) -> float | None:
        """The part of the time that was waiting, in [0, 1]; None before the first step."""
        counted = [self._later] if self._steps > 2 * WARM_UP_STEPS else [self._first, self._later]
        data_seconds, seconds = (sum(column) for column in zip(*counted, strict=True))
        return data_seconds / seconds if seconds else None


def all_costs(waiting: Waiting, world: World) -> tuple[dict[str, Any], int]:
    """The largest of each over all ranks, as in the summary, and who waited most for its data (a collective)."""
    gpu = torch.accelerator.max_memory_allocated(world.device) if world.device.type != "cpu" else 0
    shares, peaks, gpu_peaks = zip(*all_gather_object([waiting.share() or 0.0, peak_memory(), gpu], world), strict=True)
    most = max(shares)
    share = None if waiting.share() is None else round(most, 4)
    costs = {"peak_memory_bytes": max(peaks) or None, "peak_gpu_memory_bytes": max(gpu_peaks) or None}
    return {"data_share": share, **costs}, shares.index(most)


def held_bytes(tensors: Iterable[Any]) -> int:
    """The memory that these tensors lie in, each piece once; of a sharded one, this rank's part."""
    found: dict[int, int] = {}
    for value in tensors:
        local: Any = value.to_local() if hasattr(value, "to_local") else value
        if isinstance(local, Tensor):
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def data_lines(summary: Summary, rank: int, parts: "Parts") -> list[str]:
    """One line on waiting for data, most of all by `rank`, with what may be done about it; none if it is little."""
    if summary.data_share is None or summary.data_share < WORTH_TELLING:
        return []
    dataset, num_workers, world = parts.train_set, parts.loading.num_workers, parts.replica.world
    who = f"rank {rank}" if world.size > 1 else "it"
    waited = f"{summary.data_share:.0%} of the time of a step {who} waited for data"
    if parts.stream is not None:
        return [f"{waited}{'' if num_workers else '. Try: --num-workers 1, to read ahead'}"]
    spare = usable_cores() - world.local_size * (num_workers + 1)
    if batch_gatherer(dataset) is not None:
        return [f"{waited}: a batch is gathered at once, so the time is that of its transform"]
    batched = "" if asks_for_batches(dataset) else "give the dataset __getitems__ for a whole batch at once"
    workers = f"--num-workers {max(1, 2 * num_workers)}" if spare > 0 or world.device.type != "cpu" else ""
    remedies = [r for r in (workers, batched, "hold the data as an ArrayDataset if they fit into memory") if r]
    return [f"{waited}. Try: {', or '.join(remedies)} (docs/speed.md)"]
