"""Cuts a task's model along `tensor`, seeing on its first samples that it computes what the whole one does."""

from collections.abc import Callable, Mapping

from torch import nn

from paceline.checkpoint.cut import CutParameter
from paceline.errors import UsageError, plural
from paceline.sums import told_once
from paceline.tasks.task import Task
from paceline.tensor.cut import cut_along_tensor
from paceline.worker.world import World


def cut_task(
    task: Task, model: nn.Module, loss: Callable[[], float], samples: int, world: World, strategy: str | None,
    global_batch: int, *, sequence: bool = False,
) -> tuple[Mapping[str, CutParameter], list[str]]:  # fmt: skip
    """Cut `model` in place (a collective).

    Args:
        task: says what is cut, where that is not what is found.
        model: whole, on every rank.
        loss: of the task's first `samples`, as the model gives it then.
        samples: how many those are.
        world: laid out along `tensor`.
        strategy: that will train it, where one was asked for.
        global_batch: in samples.
        sequence: see `cut_along_tensor`.

    Returns:
        What is cut, by name; and what the user should know of it, with the bytes of a step of `global_batch` samples.

    Raises:
        UsageError: as `cut_along_tensor`; or fsdp cannot take what was cut. ToldElsewhere on all ranks but one.
    """
    cutting = cut_along_tensor(model, world, task.parallelize, loss, sequence=sequence)
    if strategy == "fsdp" and cutting.used_elsewhere:  # it puts other tensors in the place of these
        words = f"{cutting.used_elsewhere[0]} is cut, and the model uses it beside its own layer"
        advice = "Say 'whole' for that in Task(parallelize=...), or take another strategy"
        raise told_once(UsageError(f"--mesh {world.mesh} with --strategy fsdp: {words}. {advice}"), world)
    told = cutting.table(model, samples, global_batch // world.data.size)
    along = world.along("tensor")
    if along.local_size < along.size:
        ranks = plural(world.local_size, "rank")
        told.append(
            "WARNING: ranks along tensor are on several hosts, and all these bytes travel between hosts in each step. "
            f"Let tensor divide the {ranks} of a host, and use data or pipeline between hosts"
        )
    return cutting.cuts, told
