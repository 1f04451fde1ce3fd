"""The costs of a run over all ranks, reported at its end: the time spent waiting for data, and the peak memory."""

from typing import TYPE_CHECKING, Any

import torch

from paceline.collectives.control import all_gather_object
from paceline.compute.resources import peak_memory
from paceline.data.arrays import batch_gatherer
from paceline.data.workers import has_batched_getitems
from paceline.host.cgroup import usable_cores
from paceline.rank.world import World
from paceline.runs.summary import Summary

if TYPE_CHECKING:
    from paceline.train.prepare import TrainingComponents

REPORTED_FROM = 0.1  # of the time of a step


def max_costs_over_ranks(data_share: float | None, world: World) -> tuple[dict[str, Any], int]:
    """The maximum of each cost over all ranks, and the rank that waited most for its data (collective)."""
    gpu = torch.accelerator.max_memory_allocated(world.device) if world.device.type != "cpu" else 0
    local = [data_share or 0.0, peak_memory(), gpu]
    fractions, peaks, gpu_peaks = zip(*all_gather_object(local, world), strict=True)
    largest = max(fractions)
    costs = {"peak_memory_bytes": max(peaks) or None, "peak_gpu_memory_bytes": max(gpu_peaks) or None}
    return {"data_share": None if data_share is None else round(largest, 4), **costs}, fractions.index(largest)


def data_wait_lines(summary: Summary, rank: int, parts: "TrainingComponents") -> list[str]:
    """One line about the time that `rank` waited for data, with possible remedies; none if the time is short."""
    if summary.data_share is None or summary.data_share < REPORTED_FROM:
        return []
    dataset, num_workers, world = parts.train_set, parts.loading.num_workers, parts.replica.world
    subject = f"rank {rank}" if world.size > 1 else "the process"
    message = f"{subject} waited for data during {summary.data_share:.0%} of the step time"
    if parts.stream is not None:
        return [f"{message}{'' if num_workers else '. Try: --num-workers 1, to read ahead'}"]
    spare_cores = usable_cores() - world.local_size * (num_workers + 1)
    if batch_gatherer(dataset) is not None:
        return [f"{message}. It gathers whole batches, so the time is spent in the transform"]
    batched = "" if has_batched_getitems(dataset) else "add __getitems__ to the dataset, to load a whole batch at once"
    workers = f"--num-workers {max(1, 2 * num_workers)}" if spare_cores > 0 or world.device.type != "cpu" else ""
    remedies = [r for r in (workers, batched, "use an ArrayDataset, if the data fit into memory") if r]
    return [f"{message}. Try: {', or '.join(remedies)} (docs/speed.md)"]
