"""Cuts a task's model along `tensor`, seeing on its first samples that it computes what the whole one does."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from paceline.checkpoint.cut import CutParameter
from paceline.data.loader import Loading, fetch
from paceline.errors import UsageError, plural
from paceline.seeding import preserved_streams
from paceline.sums import told_once
from paceline.tasks.task import Task, call
from paceline.tensor.cut import cut_along_tensor
from paceline.train.evaluate import evaluating
from paceline.train.step import weighted_losses
from paceline.worker.world import World

TRIED = 2  # samples


def cut_task(
    task: Task,
    model: nn.Module,
    dataset: Dataset[Any],
    loading: Loading,
    world: World,
    strategy: str | None,
    global_batch: int,
) -> tuple[Mapping[str, CutParameter], list[str]]:
    """Cut `model` in place (a collective).

    Returns:
        What is cut, by name; and what the user should know of it, with the bytes of a step of `global_batch` samples.

    Raises:
        UsageError: as `cut_along_tensor`; or fsdp cannot take what was cut. ToldElsewhere on all ranks but one.
    """
    indices = torch.arange(min(TRIED, len(dataset)))  # pyright: ignore[reportArgumentType]

    def loss() -> float:  # with a graph, as in a step
        with preserved_streams(), evaluating(model), torch.enable_grad():
            ((inputs, targets),) = fetch(dataset, [(0, indices)], 0, loading)
            losses, weights = weighted_losses(task.loss, call(model, inputs), targets)
            return float((losses if weights is None else losses * weights).detach().sum())

    cutting = cut_along_tensor(model, world, task.parallelize, loss)
    if strategy == "fsdp" and cutting.used_elsewhere:  # it puts other tensors in the place of these
        words = f"{cutting.used_elsewhere[0]} is cut, and the model uses it beside its own layer"
        advice = "Say 'whole' for that in Task(parallelize=...), or take another strategy"
        raise told_once(UsageError(f"--mesh {world.mesh} with --strategy fsdp: {words}. {advice}"), world)
    told = cutting.table(model, len(indices), global_batch // world.data.size)
    along = world.along("tensor")
    if along.local_size < along.size:
        ranks = plural(world.local_size, "rank")
        told.append(
            "WARNING: ranks along tensor are on several hosts, and all these bytes travel between hosts in each step. "
            f"Let tensor divide the {ranks} of a host, and use data or pipeline between hosts"
        )
    return cutting.cuts, told
