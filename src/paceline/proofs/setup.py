"""What is trained in a verification: the task's model in float64, on data that are uneven on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]
from torch.utils.data import Dataset, Subset

from paceline.data.arrays import ArrayDataset
from paceline.errors import UsageError
from paceline.seeding import derive
from paceline.tasks.task import Task
from paceline.verify.spec import Policy, Spec


def build(task: Task, seed: int) -> nn.Module:
    """The task's model in float64; its inputs are cast to it, whatever the data are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "verify"))
        model = task.make_model().double()
    model.register_forward_pre_hook(lambda _, inputs: tuple(_cast(i) for i in inputs))
    return model


def _cast(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: _cast(value) for key, value in batch.items()}
    return [_cast(value) for value in batch] if isinstance(batch, (list, tuple)) else batch


def uneven_data(task: Task, spec: Spec, policy: Policy) -> tuple[Dataset[Any], int]:
    """The first samples of the training data, as many as make every kind of uneven step; and the global batch.

    Two global batches whose shares differ by one, and a last, smaller one.
    """
    batch_size = spec.batch_size or (3 if policy == "none" else 8)
    short_tail = policy == "none" if spec.short_tail is None else spec.short_tail
    ranks, share = spec.virtual_ranks, spec.accumulation * batch_size
    global_batch = max(2, ranks * share - 1)
    tail = max(2, ranks - 1) if short_tail else ranks * (share - 3) + 1
    needed = 2 * global_batch + tail
    dataset = task.make_dataset("train")
    there = len(dataset)  # pyright: ignore[reportArgumentType]
    if there < needed:
        raise UsageError(f"verify needs {needed} training samples for {ranks} virtual ranks, the task has {there}")
    if isinstance(dataset, ArrayDataset):  # keep the fast path in the test
        return ArrayDataset(dataset.inputs[:needed], dataset.targets[:needed], dataset.transform), global_batch
    return Subset(dataset, range(needed)), global_batch


def has_batch_norm(model: nn.Module) -> bool:
    """Whether batch norm's policies make a difference."""
    return any(isinstance(m, _BatchNorm) for m in model.modules())


def has_dropout(model: nn.Module) -> bool:
    """Whether training forwards draw random numbers."""
    return any(isinstance(m, _DropoutNd) and m.p > 0 for m in model.modules())


def without_dropout(model: nn.Module, policy: Policy) -> nn.Module:
    """Under synchronised batch norm dropout is off: its masks would depend on the world size."""
    if policy == "sync":
        for module in model.modules():
            if isinstance(module, _DropoutNd):
                module.p = 0.0
    return model


def task_options(spec: Spec) -> dict[str, Any]:
    """The task's options, as load_task takes them."""
    return {k: Path(v) if k == "data_dir" else v for k, v in spec.options.items()}
