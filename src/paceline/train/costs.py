"""What did a rank's run cost beside computing? Waiting for data, and memory; told at the end, over all ranks."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from paceline.compute.allocator import peak_memory
from paceline.data.arrays import batch_gatherer
from paceline.data.seeded import asks_for_batches
from paceline.host.cgroup import usable_cores
from paceline.sums import gather_words
from paceline.train.prepare import Parts
from paceline.worker.world import World

WARM_UP_STEPS = 5  # the first batches wait for loader processes to start
WORTH_TELLING = 0.1


class Costs(msgspec.Struct, frozen=True):
    """Of one rank, or the largest of several."""

    data_share: float | None = None  # of the time of its steps; None: no step was taken
    peak_memory_bytes: int = 0  # resident
    peak_gpu_memory_bytes: int = 0

    def fields(self) -> dict[str, Any]:
        """Those of the run's summary."""
        share = None if self.data_share is None else round(self.data_share, 4)
        return {
            "data_share": share,
            "peak_memory_bytes": self.peak_memory_bytes or None,
            "peak_gpu_memory_bytes": self.peak_gpu_memory_bytes or None,
        }


class Waiting:
    """Fed once a step: how much of its time went by waiting for data. The first steps count only if there are few."""

    def __init__(self) -> None:
        self._steps: int = 0
        self._first = [0.0, 0.0]  # seconds of data, of all
        self._later = [0.0, 0.0]

    def step(self, data_seconds: float, seconds: float) -> None:
        """A step of `seconds`, of which so many were spent waiting for its data."""
        self._steps += 1
        kept = self._first if self._steps <= WARM_UP_STEPS else self._later
        kept[0] += data_seconds
        kept[1] += seconds

    def share(self) -> float | None:
        """The part of the time that was waiting, in [0, 1]; None before the first step."""
        counted = [self._later] if self._steps > 2 * WARM_UP_STEPS else [self._first, self._later]
        data_seconds, seconds = (sum(column) for column in zip(*counted, strict=True))
        return data_seconds / seconds if seconds else None


def all_costs(waiting: Waiting, world: World) -> tuple[Costs, int]:
    """The largest of each over all ranks, and the rank that waited most for its data (a collective)."""
    gpu = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else 0
    mine = Costs(waiting.share(), peak_memory(), gpu)
    told = [msgspec.convert(words, Costs) for words in gather_words(msgspec.to_builtins(mine), world)]
    shares = [cost.data_share or 0.0 for cost in told]
    share = None if told[0].data_share is None else max(shares)
    peak = max(cost.peak_memory_bytes for cost in told)
    return Costs(share, peak, max(cost.peak_gpu_memory_bytes for cost in told)), shares.index(max(shares))


def data_lines(costs: Costs, rank: int, parts: Parts) -> list[str]:
    """What to say of waiting for data, most of all by `rank`: nothing, or one line with what may be done about it."""
    if costs.data_share is None or costs.data_share < WORTH_TELLING:
        return []
    dataset, num_workers, world = parts.train_set, parts.loading.num_workers, parts.replica.world
    who = f"rank {rank}" if world.size > 1 else "it"
    waited = f"{costs.data_share:.0%} of the time of a step {who} waited for data"
    spare = usable_cores() - world.local_size * (num_workers + 1)
    if batch_gatherer(dataset) is not None:
        return [f"{waited}: a batch is gathered at once, so the time is that of its transform"]
    batched = "" if asks_for_batches(dataset) else "give the dataset __getitems__ for a whole batch at once"
    workers = f"--num-workers {max(1, 2 * num_workers)}" if spare > 0 or world.device.type != "cpu" else ""
    remedies = [r for r in (workers, batched, "hold the data as an ArrayDataset if they fit into memory") if r]
    return [f"{waited}. Try: {', or '.join(remedies)} (docs/speed.md)"]
