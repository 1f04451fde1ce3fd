"""What a verification trains: the task's model in float64, uneven data, and a strategy applied to the model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset, Subset

from paceline.collectives.batchnorm import convert
from paceline.collectives.control import new_group, together
from paceline.compute.recompute import recompute
from paceline.data.arrays import ArrayDataset
from paceline.data.loader import Loading, MicroBatch, load_steps
from paceline.data.plan import BatchPlan, ranks_share
from paceline.data.streams import first_of
from paceline.errors import UsageError
from paceline.nested import mapped
from paceline.rank.world import World
from paceline.seeding import derive
from paceline.strategies import STRATEGIES, Replica
from paceline.strategies.base import MakeOptimizer
from paceline.tasks import load_task
from paceline.tasks.task import Task
from paceline.train.optimizer import OwnSchedule, checked_optimizer
from paceline.train.sharing import Wish, share_model
from paceline.verify.spec import OWN, Policy, Spec

LR = 1e-3
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    # fused, as in training: these look at memory, not at strides
    "sgd": partial(SGD, lr=LR, momentum=0.9, weight_decay=1e-2, fused=True),
    "adamw": partial(AdamW, lr=LR, weight_decay=1e-2, fused=True),
}


@dataclass(frozen=True)
class Setting:
    """What all strategies under one batch norm policy share, on one rank."""

    spec: Spec
    task: Task
    policy: Policy
    dataset: Dataset[Any]
    plan: BatchPlan
    world: World


def task_of(spec: Spec) -> Task:
    """Load the task with its options."""
    return load_task(spec.task, {k: Path(v) if k == "data_dir" else v for k, v in spec.options.items()})


def optimizers_of(spec: Spec, task: Task, model: nn.Module) -> dict[str, type[Optimizer]]:
    """Which are verified, and of what type they are; each is made once for `model`, also its schedule.

    Raises:
        UsageError: the task makes none, or none that can be trained with.
    """
    own = task.make_optimizer is not None
    names = spec.optimizers or ([OWN] if own else [*OPTIMIZERS])
    if OWN in names and not own:
        raise UsageError(f"--optimizers {OWN}: the task makes none. Choose from: {', '.join(OPTIMIZERS)}")
    made = {name: maker_of(name, task, model)(model.parameters()) for name in names}
    for name, optimizer in made.items():
        if has_schedule(name, task):
            add_schedule(task, optimizer, spec.steps)
    return {name: type(optimizer) for name, optimizer in made.items()}


def maker_of(name: str, task: Task, model: nn.Module) -> MakeOptimizer:
    """What makes the optimizer of `model`."""
    if name != OWN or task.make_optimizer is None:
        return OPTIMIZERS[name]
    made = checked_optimizer(task.make_optimizer(model))
    return lambda _: made


def has_schedule(name: str, task: Task) -> bool:
    """Whether the task's own schedule is meant for this optimizer."""
    return task.make_schedule is not None and (name == OWN or task.make_optimizer is None)


def add_schedule(task: Task, optimizer: Optimizer, steps: int) -> None:
    """Let the task's own schedule step after the optimizer."""
    assert task.make_schedule is not None
    OwnSchedule(optimizer, task.make_schedule(optimizer, steps), steps)


def make_setting(spec: Spec, task: Task, policy: Policy, world: World) -> Setting:
    """Cut the task's data unevenly, and plan who sees what (a collective)."""
    with together(world):
        dataset, global_batch = _uneven_data(task, spec, policy)
    samples: int = len(dataset)  # pyright: ignore[reportArgumentType]
    plan = BatchPlan(samples, global_batch, spec.virtual_ranks, spec.accumulation, spec.seed)
    return Setting(spec, task, policy, dataset, plan, world)


def _uneven_data(task: Task, spec: Spec, policy: Policy) -> tuple[Dataset[Any], int]:
    """The first samples of the training data, as many as make every kind of uneven step; and the global batch.

    Two global batches whose shares differ by one, and a last, smaller one.
    """
    # batch norm's backward through the statistics of a few values blows rounding up ten thousandfold
    batch_size = 3 if policy == "none" else 8
    short_tail = policy == "none" if spec.short_tail is None else spec.short_tail
    ranks, share = spec.virtual_ranks, spec.accumulation * batch_size
    global_batch = max(2, ranks * share - 1)
    tail = max(2, ranks - 1) if short_tail else ranks * (share - 3) + 1
    needed = 2 * global_batch + tail
    dataset = first_of(task.make_dataset("train"), needed)
    there = len(dataset)  # pyright: ignore[reportArgumentType]
    if there < needed:
        raise UsageError(f"verify needs {needed} training samples for {ranks} virtual ranks, the task has {there}")
    if isinstance(dataset, ArrayDataset):  # keep the fast path in the test
        return ArrayDataset(dataset.inputs[:needed], dataset.targets[:needed], dataset.transform), global_batch
    return Subset(dataset, range(needed)), global_batch


def build(task: Task, seed: int, device: torch.device) -> nn.Module:
    """The task's model in float64 on `device`; its inputs are cast to it, whatever the data are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "verify"))
        return in_double(task.make_model()).to(device)


def in_double(model: nn.Module) -> nn.Module:
    """`model` in float64. Its inputs are cast to it."""
    model.double().register_forward_pre_hook(lambda _, *inputs: mapped(inputs, to_double), with_kwargs=True)
    return model


def to_double(tensor: Tensor) -> Tensor:
    """In float64, if it is a floating-point number."""
    return tensor.double() if tensor.is_floating_point() else tensor


def apply_strategy(
    setting: Setting, strategy: str, optimizer: str, model: nn.Module
) -> tuple[Replica, Iterator[list[MicroBatch]]]:
    """This rank's part of a training of `model`, and its batches (a collective).

    Give each rank a model from another seed: only a broadcast from rank 0, whose seed is the run's, makes them start
    alike.
    """
    spec, world, maker = setting.spec, setting.world, maker_of(optimizer, setting.task, model)
    if spec.checkpoint_activations:
        recompute(model, spec.checkpoint_activations)
    merged = setting.policy == "sync"
    if merged:
        model = convert(model, new_group())
    loading, data = Loading(world.device, 0, setting.task.collate), world.data
    model.train()
    wish = Wish(strategy, schedule=spec.schedule_pipeline, sequence=spec.sequence_parallel)
    sharing = share_model(setting.task, model, setting.dataset, loading, setting.plan, world, wish)
    replica = sharing.apply(STRATEGIES[strategy], model, maker, world, spec.virtual_ranks)
    if has_schedule(optimizer, setting.task):
        add_schedule(setting.task, replica.optimizer, spec.steps)
    replica.model.train()
    share = ranks_share(spec.virtual_ranks, data.rank, data.size)
    batches = load_steps(setting.dataset, setting.plan, share, loading, start=0, stop=spec.steps, merged=merged)
    return replica, batches


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


def world_on(device: str) -> World:
    """This rank's world, over gloo where it shares its GPU with others."""
    world = World.from_env(device=device, backend="gloo")
    alone = world.device.type == "cpu" or world.local_size > torch.accelerator.device_count()
    return world if alone else World.from_env(device=device)
