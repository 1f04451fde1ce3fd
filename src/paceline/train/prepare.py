"""Builds from a configuration the parts of a training, and checks them on all ranks before the first step."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import Dataset

from paceline.checkpoint.resume import ResumePoint
from paceline.collectives.batchnorm import convert
from paceline.collectives.control import check_equal, new_group, together, told_once
from paceline.compute.flops import FlopCount
from paceline.config.settings import (
    BatchShape,
    TrainConfig,
    batch_shape,
    default_strategy,
    strategy_options,
    task_options,
)
from paceline.config.strategies import STRATEGY_INFO, options_of_others
from paceline.data.arrays import batch_gatherer, on_device
from paceline.data.fingerprint import data_fingerprint, hash_of
from paceline.data.loader import Loading, fetch
from paceline.data.plan import BatchPlan, ranks_share
from paceline.data.streams import is_stream
from paceline.data.workers import Room, check_room
from paceline.errors import UsageError
from paceline.rank.world import World
from paceline.seeding import derive, preserved_streams, random_stream
from paceline.strategies import STRATEGIES, Strategy
from paceline.strategies.base import MakeOptimizer
from paceline.tasks import load_task
from paceline.tasks.settings import defined
from paceline.tasks.task import SPLITS, Split, Task, call
from paceline.train.average import Average
from paceline.train.computing import STATE_COPIES, Settled, settle
from paceline.train.determinism import explained
from paceline.train.evaluate import evaluating, try_evaluation
from paceline.train.optimizer import Rates, described, maker_for, scaled_lr, schedule_for
from paceline.train.sharing import ALONE, Sharing, Wish, share_model
from paceline.train.step import weighted_losses
from paceline.train.stream_task import stream_of
from paceline.train.streaming import Stream

NAMES = {"train": "training data", "validation": "validation data", "test": "test data"}


@dataclass(frozen=True)
class Parts:
    """Everything a training needs, on one rank."""

    config: TrainConfig
    task: Task
    train_set: Dataset[Any]
    eval_sets: Mapping[Split, Dataset[Any]]
    """what is evaluated on the way, then what is evaluated at the end only"""
    replica: Strategy
    plan: BatchPlan
    share: range
    schedule: Rates
    loading: Loading
    total_steps: int
    """0: nobody knows, of passes over a stream"""
    data: dict[str, Any]
    """what identifies the data of each split"""
    settled: Settled = field(default_factory=Settled)
    own: dict[str, Any] = field(default_factory=dict[str, Any])
    """what the task says in place of settings, for the definition"""
    average: Average | None = None
    stream: Stream | None = None
    """what is trained on, where it is one; the training set then holds its first samples"""
    count: FlopCount | None = None
    """the FLOPs of two samples, on the whole model"""

    def take_over(self, origin: ResumePoint) -> None:
        """Go on from `origin`."""
        self.replica.load(origin.source)
        self.schedule.load(origin.content.loop)


def prepare(config: TrainConfig, world: World) -> Parts:
    """Build and check all parts (a collective).

    Raises:
        UsageError: on one rank, for whatever is wrong with the task, the data, the model or their fit to this world;
            ReportedByPeer on all others.
    """
    with together(world):  # first what each rank does alone, above all the user's own code
        shape = batch_shape(config.data, world.data.size)
        share = ranks_share(shape.virtual_ranks, world.data.rank, world.data.size)
        largest = math.ceil(shape.global_batch / (shape.virtual_ranks * shape.accumulation))
        task = load_task(str(config.task), task_options(config))
        sets: dict[Split, Dataset[Any]] = {split: task.make_dataset(split) for split in SPLITS if split in task.splits}
        loading = Loading(world.device, config.data.num_workers, task.collate)
        stream = stream_of(config, task, sets["train"], shape, loading, world) if is_stream(sets["train"]) else None
        if stream is not None:
            if world.data is not world:
                raise UsageError(code="stream-on-mesh")
            sets["train"] = cast("Any", stream.head(largest if config.compute.precision == "auto" else 2))
        for split, dataset in sets.items():
            if is_stream(dataset):
                raise UsageError(code="evaluation-of-stream", data=NAMES[split])
            if len(dataset) == 0:  # pyright: ignore[reportArgumentType]
                raise UsageError(code="no-samples", data=NAMES[split])
        train_set = sets["train"]
        plan = make_plan(config, shape, len(train_set)) if stream is None else stream.plan  # pyright: ignore[reportArgumentType]
        data = {NAMES[split]: data_fingerprint(dataset, loading) for split, dataset in sets.items()}
        if stream is not None:
            data[NAMES["train"]] = {"first samples of a stream": hash_of(cast("Any", train_set)[:2])}
        model = make_model(task, config.run.seed, world)
        o = config.optimizer
        peak_lr = scaled_lr(o.lr, o.lr_scaling, shape.global_batch, o.lr_base_batch)
        maker = maker_for(o, peak_lr, task, model)
        made = None if task.make_optimizer is None else described(maker(model.parameters()))
        count, alone = None if config.compute.peak_tflops == 0 else FlopCount(), replace(loading, num_workers=0)
        if count is not None and config.compute.compile:  # before that: operations of compiled code are not seen
            check_loss(task, model, train_set, alone, count=count)
    settled = settle(config.compute, model, task, train_set, loading, largest, world)
    config = replace(config, compute=replace(config.compute, precision=settled.precision))
    with together(world):
        room = Room(largest, config.data.num_workers, world.local_size)
        sample_bytes = check_loss(task, model, train_set, alone, room, None if config.compute.compile else count)
        with preserved_streams():  # an epoch must not be trained in vain
            for split in list(sets)[1:]:
                try_evaluation(model, sets[split], task.loss, task.metrics, alone)
        if config.data.data_on_device == "auto":
            reserved = sample_bytes * largest + (STATE_COPIES - 1) * sum(p.nbytes for p in model.parameters())
            move = partial(on_device, device=world.device, reserved=reserved, collate=task.collate)
            sets = {split: move(dataset) for split, dataset in sets.items()}
    for what, content in data.items():
        check_equal(what, content, world)
    wish = wish_of(config)
    sharing = share_model(task, model, train_set, alone, plan, world, wish)
    settled = replace(settled, notices=[*settled.notices, *sharing.lines])
    replica = make_replica(config, maker, model, world, shape.virtual_ranks, sharing)
    total_steps = config.run.steps or config.run.epochs * plan.known_steps
    with together(world):
        schedule = schedule_for(o, peak_lr, task, replica.optimizer, total_steps)
    own = {"make_optimizer": made, "make_schedule": schedule.described}
    own |= defined(str(config.task), task_options(config))
    check_equal("the task's settings, optimizer and schedule", own, world)
    train_set = sets.pop("train")
    average = replica.average = None if o.ema is None else Average(replica, o.ema)
    return Parts(
        config, task, train_set, sets, replica, plan, share, schedule, loading, total_steps, data, settled, own,
        average, stream, count,
    )  # fmt: skip


def wish_of(config: TrainConfig) -> Wish:
    """How the model is to be shared, of what the mesh leaves open."""
    asked = config.launch
    return Wish(config.strategy, asked.stages_at or "", asked.schedule_pipeline or "1f1b", asked.sequence_parallel)


def make_model(task: Task, seed: int, world: World) -> nn.Module:
    """The task's model on the world's device, its weights drawn from `seed`."""
    with random_stream(derive(seed, "model"), torch.device("cpu")):
        model = task.make_model()
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        raise UsageError(code="lazy-layers")
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(code="nothing-to-train")
    odd = next((name for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)), None)
    if odd is not None:
        raise UsageError(code="extra-state", odd=odd)
    return model.to(world.device)


def make_plan(config: TrainConfig, shape: BatchShape, num_samples: int) -> BatchPlan:
    """Who sees what, for data of `num_samples` samples."""
    return BatchPlan(
        num_samples=num_samples,
        global_batch=shape.global_batch,
        virtual_ranks=shape.virtual_ranks,
        accumulation=shape.accumulation,
        seed=config.run.seed,
        tail=config.data.tail,
    )


def make_replica(
    config: TrainConfig, maker: MakeOptimizer, model: nn.Module, world: World, virtual_ranks: int,
    sharing: Sharing = ALONE,
) -> Strategy:  # fmt: skip
    """Apply the batch norm policy and the strategy, to a part of the model if ranks share it (a collective)."""
    try:
        if config.model.batchnorm == "sync":
            # A group of its own: its collectives must not pair up with those of gradient buckets, whose order relative
            # to them depends on what each rank's backward finishes first.
            model = convert(model, new_group())
        name, asked = default_strategy(config, world.size), strategy_options(config)
        for setting, owner in options_of_others(name).items():
            if setting in asked:
                flag = setting.replace("_", "-")
                raise told_once(UsageError(code="option-of-another-strategy", flag=flag, owner=owner, name=name), world)
        own = {keyword: asked.get(setting) for setting, keyword in STRATEGY_INFO[name].options.items()}
        return sharing.apply(partial(STRATEGIES[name], **own), model, maker, world, virtual_ranks)
    except (TypeError, ValueError) as error:  # a layer that cannot be synchronised; models that differ: on all ranks
        raise told_once(UsageError(str(error)), world) from None


def check_loss(
    task: Task, model: nn.Module, dataset: Dataset[Any], loading: Loading, room: Room | None = None,
    count: FlopCount | None = None,
) -> int:  # fmt: skip
    """Try loss and backward on the first two samples, so that what cannot work fails before the first step.

    `room`, where given, must suffice for batches of their kind. `count` counts the FLOPs.

    Returns:
        The bytes of a GPU's memory that one sample's batch and activations take; 0 on the CPU.
    """
    on_gpu, before_bytes = loading.device.type != "cpu", 0
    if on_gpu:
        torch.accelerator.reset_peak_memory_stats(loading.device)
        before_bytes = torch.accelerator.memory_allocated(loading.device)
    indices = torch.arange(min(2, len(dataset)))  # pyright: ignore[reportArgumentType]
    # in eval mode: touches no batch statistics and draws no dropout
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with preserved_streams(), evaluating(model), explained(UsageError), torch.enable_grad():
        for inputs, targets in fetch(dataset, [(0, indices)], 0, loading):
            if room is not None and batch_gatherer(dataset) is None:  # which needs no processes
                check_room((inputs, targets), len(indices), room)
            with nullcontext() if count is None else count.of(len(indices)):
                losses, _ = weighted_losses(task.loss, call(model, inputs), targets)
                if losses.requires_grad:  # a model may switch gradients off in eval mode
                    losses.sum().backward()
                    if count is not None:
                        count.mark()
    model.zero_grad(set_to_none=True)
    for name, buffer in model.named_buffers():
        if name not in before:
            raise UsageError(code="buffer-made-in-forward", name=name)
        if buffer.shape == before[name].shape:
            buffer.detach().copy_(before[name])
    if not on_gpu:
        return 0
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    taken = torch.accelerator.max_memory_allocated(loading.device) - before_bytes - gradients
    return max(0, taken) // len(indices)
