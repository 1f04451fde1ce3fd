"""Builds the components of a training from its configuration, and checks them on all ranks before the first step."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from paceline.checkpoint.state import ResumePoint
from paceline.collectives.batchnorm import convert_sync_batchnorm
from paceline.collectives.control import (
    all_gather_object,
    check_equal,
    error_on_one_rank,
    new_group,
    raise_on_all_ranks,
)
from paceline.compute.compiling import compile_model, use_cuda_graphs
from paceline.compute.flops import FlopCounter
from paceline.compute.forward import checkpoint_activations
from paceline.compute.precision import MIN_BF16_SPEEDUP, autocast_wrapper, bf16_unsupported_reason, time_alternatives
from paceline.compute.resources import tune_malloc
from paceline.config.definition import make_run_definition
from paceline.config.settings import (
    DEFAULT_BATCH_SIZE,
    BatchSizes,
    ComputeConfig,
    TrainConfig,
    resolve_batch_sizes,
    resolve_strategy,
    strategy_options,
    task_options,
)
from paceline.config.strategies import STRATEGY_INFO, unsupported_settings
from paceline.data.arrays import batch_gatherer, on_device
from paceline.data.fingerprint import data_fingerprint, hash_samples
from paceline.data.loader import (
    LoadingOptions,
    fetch_inputs_and_targets,
    index_of_largest_sample,
    load_dummy_batch,
    split_inputs_and_targets,
)
from paceline.data.plan import BatchPlan
from paceline.data.streams import ENDLESS_NUM_SAMPLES, StreamBatchPlan, is_stream
from paceline.data.workers import check_shared_memory_size
from paceline.errors import UsageError
from paceline.host.cgroup import free_memory
from paceline.rank.world import World
from paceline.seeding import derive_seed, fork_rng_with_seed, preserve_generator_states
from paceline.stepping.trained_model import make_loss_scale
from paceline.strategies import STRATEGIES, Strategy
from paceline.strategies.average import EmaWeights
from paceline.strategies.base import MakeOptimizer
from paceline.tasks.registry import load_task
from paceline.tasks.settings import complete_task_args
from paceline.tasks.task import SPLITS, Split, Task, call_model
from paceline.train.compute_settings import apply_autocast, set_precision
from paceline.train.determinism import convert_missing_kernel_error, hardware_facts
from paceline.train.evaluate import eval_mode, try_evaluation
from paceline.train.memory import MicroBatchSearch, has_no_collectives, try_smallest_batch
from paceline.train.optimizer import (
    LRSchedule,
    configured_optimizer_maker,
    describe_optimizer_as_json,
    make_lr_schedule,
    scaled_lr,
)
from paceline.train.parallelism import ModelParallelPlan, ParallelConfig, parallelize_model
from paceline.train.step import TaskSteps, compute_losses_and_weights
from paceline.train.streaming import GlobalBatchStream

STATE_COPIES = 4  # weights, gradients and two optimizer states for each weight

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Allocator = Literal["tuned", "system"]
SPLIT_LABELS = {"train": "training data", "validation": "validation data", "test": "test data"}


@dataclass(frozen=True)
class TrainingComponents:
    config: TrainConfig
    task: Task
    train_set: Dataset[Any]
    eval_sets: Mapping[Split, Dataset[Any]]
    """First the split that is evaluated during training, then those that are evaluated at the end only."""
    replica: Strategy
    plan: BatchPlan
    local_virtual_ranks: range
    schedule: LRSchedule
    loading: LoadingOptions
    total_steps: int
    """0 if unknown: epochs over a stream."""
    definition: dict[str, Any]
    """Of the run: its settings, the task's optimizer and schedule, fingerprints of the data, and the hardware."""
    allocator: Allocator = "system"
    notices: list[str] = field(default_factory=list[str])
    """Lines for the user."""
    weight_average: EmaWeights | None = None
    stream: GlobalBatchStream | None = None
    """The training data, if they are a stream. `train_set` then has its first samples."""
    flop_count: FlopCounter | None = None
    """The FLOPs of two samples in the full model."""

    def load(self, origin: ResumePoint) -> None:
        self.replica.load(origin.source)
        self.schedule.load(origin.trainer_state.loop)


def prepare(config: TrainConfig, world: World) -> TrainingComponents:
    with raise_on_all_ranks(world):  # without collectives, because this block calls the user's code
        shape = resolve_batch_sizes(config.data, world.data.size)
        share = world.data.share(shape.virtual_ranks)
        largest = math.ceil(shape.global_batch / (shape.virtual_ranks * shape.accumulation))
        if config.data.micro_batch is not None:  # not found yet
            largest = min(largest, DEFAULT_BATCH_SIZE)
        task = load_task(str(config.task), task_options(config))
        sets: dict[Split, Dataset[Any]] = {split: task.make_dataset(split) for split in SPLITS if split in task.splits}
        loading = LoadingOptions(world.device, config.data.num_workers, task.collate)
        make = partial(make_data_stream, config, task, sets["train"], shape, loading, world)
        stream = make() if is_stream(sets["train"]) else None
        if stream is not None:
            if world.data is not world:
                raise UsageError(code="stream-on-mesh")
            if config.data.micro_batch is not None:
                raise UsageError(code="micro-batch-of-stream")
            if config.guard.audit_every is not None:
                raise UsageError(code="audit-of-stream")
            sets["train"] = cast("Any", stream.first_samples(largest if config.compute.precision == "auto" else 2))
        for split, dataset in sets.items():
            if is_stream(dataset):
                raise UsageError(code="evaluation-of-stream", data=SPLIT_LABELS[split])
            if len(dataset) == 0:  # pyright: ignore[reportArgumentType]
                raise UsageError(code="no-samples", data=SPLIT_LABELS[split])
        train_set = sets["train"]
        plan = make_batch_plan(config, shape, len(train_set)) if stream is None else stream.plan  # pyright: ignore[reportArgumentType]
        data = {SPLIT_LABELS[split]: data_fingerprint(dataset, loading) for split, dataset in sets.items()}
        if stream is not None:
            data[SPLIT_LABELS["train"]] = {"first samples of a stream": hash_samples(cast("Any", train_set)[:2])}
        model = make_model(task, config.run.seed, world)
        o = config.optimizer
        peak_lr = scaled_lr(o.lr, o.lr_scaling, shape.global_batch, o.lr_base_batch)
        maker = configured_optimizer_maker(o, peak_lr, task, model)
        optimizer_text = None if task.make_optimizer is None else describe_optimizer_as_json(maker(model.parameters()))
        in_process = replace(loading, num_workers=0)
        count = None if config.compute.peak_tflops == 0 else FlopCounter()
        if count is not None and config.compute.compile:  # the counter cannot see the operations of compiled code
            try_loss_on_first_samples(task, model, train_set, in_process, count=count)
    precision, allocator, notices = set_up_compute(config.compute, model, task, train_set, loading, largest, world)
    config = replace(config, compute=replace(config.compute, precision=precision))
    with raise_on_all_ranks(world):
        workers, ranks = config.data.num_workers, world.local_size
        check_size = partial(check_shared_memory_size, largest_batch=largest, num_workers=workers, local_ranks=ranks)
        count_once = None if config.compute.compile else count
        check = partial(try_loss_on_first_samples, task, model, train_set, in_process, check_size, count_once)
        sample_bytes = try_smallest_batch(check, model, world)
        with preserve_generator_states():  # an error in the evaluation must not appear only after the first epoch
            for split in list(sets)[1:]:
                try_evaluation(model, sets[split], task.loss, task.metrics, in_process)
        if config.data.data_on_device == "auto":
            reserved = sample_bytes * largest + (STATE_COPIES - 1) * sum(p.nbytes for p in model.parameters())
            move = partial(on_device, device=world.device, reserved=reserved, collate=task.collate)
            sets = {split: move(dataset) for split, dataset in sets.items()}
    for name, content in data.items():
        check_equal(name, content, world)
    parallelism = parallelize_model(task, model, train_set, in_process, plan, world, parallel_config(config))
    notices += parallelism.notices
    replica = make_configured_strategy(config, maker, model, world, shape.virtual_ranks, parallelism)
    total_steps = config.run.steps or config.run.epochs * plan.known_steps_per_epoch
    with raise_on_all_ranks(world):
        schedule = make_lr_schedule(o, peak_lr, task, replica.optimizer, total_steps)
    task_settings = {"make_optimizer": optimizer_text, "make_schedule": schedule.described}
    task_settings |= complete_task_args(str(config.task), task_options(config))
    check_equal("the task's settings, optimizer and schedule", task_settings, world)
    train_set = sets.pop("train")
    average = replica.average = None if o.ema is None else EmaWeights(replica.state(), o.ema)
    if config.data.micro_batch is not None:
        plan, notice = search_largest_micro_batch(config, task, replica, train_set, plan, share, loading)
        notices.append(notice)
        config = replace(config, data=replace(config.data, accumulation=plan.accumulation, micro_batch=None))
    facts = {"data": data, "hardware": hardware_facts(world.device)}
    return TrainingComponents(
        config, task, train_set, sets, replica, plan, share, schedule, loading, total_steps,
        {**make_run_definition(config), **task_settings, **facts}, allocator, notices, average, stream, count,
    )  # fmt: skip


def check_stream_settings(config: TrainConfig, data: Any) -> None:
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


def make_data_stream(
    config: TrainConfig, task: Task, data: Any, shape: BatchSizes, loading: LoadingOptions, world: World
) -> GlobalBatchStream:
    check_stream_settings(config, data)
    schedule = config.optimizer.schedule
    if config.run.steps is None:
        if task.make_schedule is not None:
            raise UsageError(code="schedule-without-length")
        if schedule != "constant" and task.make_optimizer is None:
            raise UsageError(code="stream-schedule-without-steps", value=schedule)
    batch, virtual_ranks, last_batch = shape.global_batch, shape.virtual_ranks, config.data.last_batch
    plan = StreamBatchPlan(
        ENDLESS_NUM_SAMPLES, batch, virtual_ranks, shape.accumulation, config.run.seed, False, last_batch
    )
    return GlobalBatchStream(data, plan, loading, world, print)


def search_largest_micro_batch(
    config: TrainConfig, task: Task, replica: Strategy, dataset: Dataset[Any], plan: BatchPlan, share: range,
    loading: LoadingOptions,
) -> tuple[BatchPlan, str]:  # fmt: skip
    """The plan with the largest micro-batches that fit on all ranks, and a text about them (a collective)."""
    world, portion = replica.world, math.ceil(plan.global_batch / plan.virtual_ranks)
    search = MicroBatchSearch([replica], world, portion, partial(all_gather_object, world=world))
    steps = TaskSteps(replica, task.loss, scale=make_loss_scale(config.compute.precision))
    merged = len(share) if config.model.batchnorm == "sync" else 1
    is_alone = has_no_collectives(replica)
    replica.model.train()
    with raise_on_all_ranks(world), preserve_generator_states():
        index = index_of_largest_sample(dataset, plan.seed, loading)
    while size := search.next_size():
        agreed = raise_on_all_ranks(world) if is_alone else nullcontext()
        with agreed, search.trial(may_fail=is_alone), preserve_generator_states():
            batch = load_dummy_batch(dataset, index, size * merged, plan, share, loading)
            steps.try_batch(split_inputs_and_targets(batch))
    return replace(plan, accumulation=search.accumulation), search.describe("--micro-batch auto", "--accumulation ")


def parallel_config(config: TrainConfig) -> ParallelConfig:
    launch = config.launch
    schedule = launch.schedule_pipeline or "1f1b"
    return ParallelConfig(config.strategy, launch.stages_at or "", schedule, launch.sequence_parallel)


def make_model(task: Task, seed: int, world: World) -> nn.Module:
    with fork_rng_with_seed(derive_seed(seed, "model"), torch.device("cpu")):
        model = task.make_model()
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        raise UsageError(code="lazy-layers")
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(code="nothing-to-train")
    not_tensors = [name for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)]
    if not_tensors:
        raise UsageError(code="extra-state", odd=not_tensors[0])
    return model.to(world.device)


def make_batch_plan(config: TrainConfig, shape: BatchSizes, num_samples: int) -> BatchPlan:
    batch, virtual_ranks, last_batch = shape.global_batch, shape.virtual_ranks, config.data.last_batch
    return BatchPlan(num_samples, batch, virtual_ranks, shape.accumulation, config.run.seed, last_batch=last_batch)


def make_configured_strategy(
    config: TrainConfig, maker: MakeOptimizer, model: nn.Module, world: World, virtual_ranks: int,
    parallelism: ModelParallelPlan,
) -> Strategy:  # fmt: skip
    try:
        if config.model.batchnorm == "sync":
            # A separate group, because the order of its collectives relative to those of gradient buckets depends on
            # the backward of each rank. In one group they could be matched wrongly.
            model = convert_sync_batchnorm(model, new_group())
        name, options = resolve_strategy(config, world.size), strategy_options(config)
        for setting, owner in unsupported_settings(name).items():
            if setting in options:
                flag = setting.replace("_", "-")
                error = UsageError(code="option-of-another-strategy", flag=flag, owner=owner, name=name)
                raise error_on_one_rank(error, world)
        keywords = {keyword: options.get(setting) for setting, keyword in STRATEGY_INFO[name].factory_kwargs.items()}
        return parallelism.make_strategy(partial(STRATEGIES[name], **keywords), model, maker, world, virtual_ranks)
    except (TypeError, ValueError) as error:  # raised on all ranks: an unsupported layer, or models that differ
        raise error_on_one_rank(UsageError(str(error)), world) from None


def try_loss_on_first_samples(
    task: Task, model: nn.Module, dataset: Dataset[Any], loading: LoadingOptions,
    check_size: Callable[[Any, int], None] | None = None, count: FlopCounter | None = None, samples: int = 2,
) -> int:  # fmt: skip
    """Run forward, loss and backward on the first `samples` samples, so that errors appear before the first step.

    The model does not change. `check_size` gets the batch and its number of samples. `count` counts FLOPs.

    Returns:
        The GPU memory, in bytes, of the inputs and activations of one sample; 0 on the CPU.
    """
    on_gpu, before_bytes = loading.device.type != "cpu", 0
    if on_gpu:
        torch.accelerator.reset_peak_memory_stats(loading.device)
        before_bytes = torch.accelerator.memory_allocated(loading.device)
    indices = torch.arange(min(samples, len(dataset)))  # pyright: ignore[reportArgumentType]
    # eval mode: no update of batch statistics and no dropout
    buffers_before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with preserve_generator_states(), eval_mode(model), convert_missing_kernel_error(UsageError), torch.enable_grad():
        for inputs, targets in fetch_inputs_and_targets(dataset, [(0, indices)], 0, loading):
            if check_size is not None and batch_gatherer(dataset) is None:  # gathering needs no worker processes
                check_size((inputs, targets), len(indices))
            with nullcontext() if count is None else count.count_flops(len(indices)):
                losses, _ = compute_losses_and_weights(task.loss, call_model(model, inputs), targets)
                if losses.requires_grad:  # some models disable gradients in eval mode
                    losses.sum().backward()
                    if count is not None:
                        count.mark_backward_end()
    model.zero_grad(set_to_none=True)
    for name, buffer in model.named_buffers():
        if name not in buffers_before:
            raise UsageError(code="buffer-made-in-forward", name=name)
        if buffer.shape == buffers_before[name].shape:
            buffer.detach().copy_(buffers_before[name])
    if not on_gpu:
        return 0
    gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    used_bytes = torch.accelerator.max_memory_allocated(loading.device) - before_bytes - gradient_bytes
    return max(0, used_bytes) // len(indices)


def set_up_compute(
    config: ComputeConfig, model: nn.Module, task: Task, dataset: Dataset[Any], loading: LoadingOptions, samples: int,
    world: World,
) -> tuple[Precision, Allocator, list[str]]:  # fmt: skip
    """Resolve the `auto` settings, and set up `model` in place (collective). No strategy is applied yet.

    Returns the precision, the allocator of this rank, and lines for the user.

    `--precision auto` measures steps of the task on a micro-batch of `samples` samples, the largest of the run.
    """
    seconds: dict[str, float] = {}
    set_precision(config.precision, world)
    with raise_on_all_ranks(world):
        why_no_bf16 = bf16_unsupported_reason(world.device) if config.precision == "auto" else ""
        if config.checkpoint_activations:
            checkpoint_activations(model, config.checkpoint_activations)
        if config.precision == "auto" and not why_no_bf16:
            seconds = _measure_precisions(model, task, dataset, loading, samples)
    precision, notices = config.precision, list[str]()
    if precision == "auto":
        precision, notice = _choose_precision(all_gather_object([why_no_bf16, seconds], world))
        notices.append(notice)
    with raise_on_all_ranks(world):
        apply_autocast(precision, model, world.device)
        if config.cuda_graphs:
            use_cuda_graphs(model, world.device)
        if config.compile:
            compile_model(model, world.device)
        allocator, notice = _set_allocator(config, model, world)
    return precision, allocator, notices + notice


def _choose_precision(measured: list[Any]) -> tuple[Precision, str]:
    """Choose by the slowest rank, because all ranks wait for it. `measured`: for each rank, (why no bf16, seconds)."""
    lacking = next((f"on rank {rank} {why}" for rank, (why, _) in enumerate(measured) if why), "")
    if lacking:
        return "fp32", f"--precision auto: fp32, because {lacking}"
    slowest = {name: max(seconds[name] for _, seconds in measured) for name in ("fp32", "bf16")}
    gain = slowest["fp32"] / slowest["bf16"]
    chosen: Precision = "bf16" if gain >= MIN_BF16_SPEEDUP else "fp32"
    rounding = "; it rounds differently" if chosen == "bf16" else ""
    return chosen, f"--precision auto: {chosen}. A step in bf16 is {gain:.2f} times as fast as in fp32{rounding}"


def _measure_precisions(
    model: nn.Module, task: Task, dataset: Dataset[Any], loading: LoadingOptions, samples: int
) -> dict[str, float]:
    """Seconds of forward and backward on the first `samples` samples, by precision. The model does not change."""
    indices = torch.arange(min(samples, len(dataset)))  # pyright: ignore[reportArgumentType]
    forward_in_bf16 = autocast_wrapper(model, loading.device, torch.bfloat16)
    with preserve_generator_states(), eval_mode(model), torch.enable_grad():
        (batch,) = fetch_inputs_and_targets(dataset, [(0, indices)], 0, replace(loading, num_workers=0))

        def in_bf16_once(*args: Any, **kwargs: Any) -> Any:
            return forward_in_bf16(model, args, kwargs)

        def step(bf16: bool) -> None:
            outputs = call_model(model, batch[0], in_bf16_once if bf16 else None)
            losses, _ = compute_losses_and_weights(task.loss, outputs, batch[1])
            if losses.requires_grad:
                losses.sum().backward()
            model.zero_grad(set_to_none=True)

        return time_alternatives({"fp32": partial(step, False), "bf16": partial(step, True)}, loading.device)


def _set_allocator(config: ComputeConfig, model: nn.Module, world: World) -> tuple[Allocator, list[str]]:
    if config.allocator == "system" or world.device.type != "cpu":
        return "system", []
    free = free_memory()
    state = STATE_COPIES * sum(p.nbytes for p in model.parameters())
    why = tune_malloc(free_bytes=None if free is None else free // world.local_size, state_bytes=state)
    return ("system", [f"--allocator tuned is not used: {why}"]) if why else ("tuned", [])
