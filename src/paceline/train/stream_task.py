"""Builds the stream of a task, and rejects settings that a stream does not support."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from paceline.data.loader import Loading
from paceline.data.streams import ENDLESS_NUM_SAMPLES, StreamPlan
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.tasks.task import Task
from paceline.train.streaming import Stream

if TYPE_CHECKING:
    from paceline.config.settings import BatchSizes, TrainConfig


def check_stream(config: TrainConfig, data: Any) -> None:
    if isinstance(data, (DataLoader, Iterator)) or not isinstance(data, Iterable):
        why = "are neither map-style nor iterable"
        why = "are batches already" if isinstance(data, DataLoader) else why
        why = "can be read once" if isinstance(data, Iterator) else why
        raise UsageError(code="not-a-dataset", kind=type(data).__name__, why=why)
    d = config.data
    if d.last_batch == "pad":
        raise UsageError(code="stream-cannot-be-padded")
    if d.num_workers > 1:
        raise UsageError(code="stream-in-several-processes", value=d.num_workers)
    if config.model.batchnorm == "sync":
        raise UsageError(code="stream-with-sync-batchnorm")


def make_stream(
    config: TrainConfig, task: Task, data: Any, shape: BatchSizes, loading: Loading, world: World
) -> Stream:
    check_stream(config, data)
    schedule = config.optimizer.schedule
    if config.run.steps is None:
        if task.make_schedule is not None:
            raise UsageError(code="schedule-without-length")
        if schedule != "constant" and task.make_optimizer is None:
            raise UsageError(code="stream-schedule-without-steps", value=schedule)
    batch, virtual_ranks, last_batch = shape.global_batch, shape.virtual_ranks, config.data.last_batch
    plan = StreamPlan(ENDLESS_NUM_SAMPLES, batch, virtual_ranks, shape.accumulation, config.run.seed, False, last_batch)
    return Stream(data, plan, loading, world, print)
