"""The training under verification: the task's model in float64, uneven data, a strategy, and records of each step."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset, Subset

from paceline.checkpoint.shards import gather_full_state, hash_tensors
from paceline.collectives.batchnorm import convert_sync_batchnorm
from paceline.collectives.control import Deferred, all_gather_object, new_group, raise_on_all_ranks
from paceline.compute.forward import checkpoint_activations
from paceline.data.arrays import ArrayDataset
from paceline.data.loader import LoadingOptions, MicroBatch, load_steps
from paceline.data.plan import BatchPlan
from paceline.data.streams import first_samples
from paceline.errors import UsageError
from paceline.lab.ranks.causes import ErrorTracker, RankDifferences
from paceline.lab.ranks.reference import Reference, StepValues, cast_to_float64, cpu_rng_fingerprint
from paceline.lab.verify import TASK_OPTIMIZER, BatchNormPolicy, Divergence, StrategyCase, VerifySpec
from paceline.rank.world import World
from paceline.seeding import derive_seed
from paceline.stepping.totals import StepResult
from paceline.strategies import STRATEGIES, Strategy
from paceline.strategies.base import MakeOptimizer
from paceline.strategies.optimizer_scope import find_update_scope
from paceline.strategies.optimizers import each_optimizer, format_optimizer_types
from paceline.tasks.registry import load_task
from paceline.tasks.task import Task
from paceline.train.optimizer import TaskSchedule, as_single_optimizer
from paceline.train.parallelism import ParallelConfig, parallelize_model

PARAMETER = "model/"  # prefix of parameters in a state
LR = 1e-3
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    # fused, as in training: fused optimizers use memory order, not strides
    "sgd": partial(SGD, lr=LR, momentum=0.9, weight_decay=1e-2, fused=True),
    "adamw": partial(AdamW, lr=LR, weight_decay=1e-2, fused=True),
}


class OptimizerInfo(NamedTuple):
    names: str
    is_adaptive: bool
    why_not_sharded: str | None  # why strategies that shard parameters do not support it


@dataclass(frozen=True)
class VerificationSetup:
    spec: VerifySpec
    task: Task
    batch_norm_policy: BatchNormPolicy
    dataset: Dataset[Any]
    plan: BatchPlan
    world: World


def load_task_to_verify(spec: VerifySpec) -> Task:
    return load_task(spec.task, {k: Path(v) if k == "data_dir" else v for k, v in spec.options.items()})


def optimizers_to_verify(spec: VerifySpec, task: Task, model: nn.Module) -> dict[str, OptimizerInfo]:
    by_task = task.make_optimizer is not None
    names = spec.optimizers or ([TASK_OPTIMIZER] if by_task else [*OPTIMIZERS])
    if TASK_OPTIMIZER in names and not by_task:
        raise UsageError(code="verify-task-without-optimizer", value=TASK_OPTIMIZER, allowed=[*OPTIMIZERS])
    optimizers = {name: optimizer_factory(name, task, model)(model.parameters()) for name in names}
    for name, optimizer in optimizers.items():
        _add_schedule(name, task, optimizer, spec.steps)
    return {
        name: OptimizerInfo(format_optimizer_types(optimizer), not isinstance(optimizer, SGD), _refusal(optimizer))
        for name, optimizer in optimizers.items()
    }


def _refusal(optimizer: Optimizer) -> str | None:
    try:
        for one in each_optimizer(optimizer):
            find_update_scope(one, "a strategy")
    except UsageError:
        return f"shards parameters, but {format_optimizer_types(optimizer)} may need all of them at once"
    return None


def optimizer_factory(name: str, task: Task, model: nn.Module) -> MakeOptimizer:
    if name != TASK_OPTIMIZER or task.make_optimizer is None:
        return OPTIMIZERS[name]
    optimizer = as_single_optimizer(task.make_optimizer(model))
    return lambda _: optimizer


def has_schedule(name: str, task: Task) -> bool:
    return task.make_schedule is not None and (name == TASK_OPTIMIZER or task.make_optimizer is None)


def _add_schedule(name: str, task: Task, optimizer: Optimizer, steps: int) -> None:
    if task.make_schedule and has_schedule(name, task):
        TaskSchedule(optimizer, task.make_schedule, steps)


def make_verification_setup(spec: VerifySpec, task: Task, policy: BatchNormPolicy, world: World) -> VerificationSetup:
    with raise_on_all_ranks(world):
        dataset, global_batch = _uneven_dataset_and_batch(task, spec, policy)
    samples: int = len(dataset)  # pyright: ignore[reportArgumentType]
    plan = BatchPlan(samples, global_batch, spec.virtual_ranks, spec.accumulation, spec.seed)
    return VerificationSetup(spec, task, policy, dataset, plan, world)


def _uneven_dataset_and_batch(task: Task, spec: VerifySpec, policy: BatchNormPolicy) -> tuple[Dataset[Any], int]:
    """The first samples of the training data, and the size of the global batch, which is uneven on purpose.

    An epoch has two global batches whose portions differ by one sample, and a last, smaller one.
    """
    # the backward of batch norm with few values amplifies rounding ten thousandfold
    batch_size = 3 if policy == "none" else 8
    short_tail = policy == "none" if spec.short_tail is None else spec.short_tail
    ranks, portion = spec.virtual_ranks, spec.accumulation * batch_size
    global_batch = max(2, ranks * portion - 1)
    tail = max(2, ranks - 1) if short_tail else ranks * (portion - 3) + 1
    needed = 2 * global_batch + tail
    dataset = first_samples(task.make_dataset("train"), needed)
    samples = len(dataset)  # pyright: ignore[reportArgumentType]
    if samples < needed:
        raise UsageError(code="verify-too-few-samples", needed=needed, ranks=ranks, samples=samples)
    if isinstance(dataset, ArrayDataset):  # also verifies its fast path
        return ArrayDataset(dataset.inputs[:needed], dataset.targets[:needed], dataset.transform), global_batch
    return Subset(dataset, range(needed)), global_batch


def build_float64_model(task: Task, seed: int, device: torch.device) -> nn.Module:
    """The task's model in float64 on `device`. It casts its inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "verify"))
        return cast_to_float64(task.make_model()).to(device)


def _model(setting: VerificationSetup, seed: int) -> nn.Module:
    """Build the model. With synchronised batch norm it has no dropout: the masks would depend on the world size."""
    model = build_float64_model(setting.task, seed, setting.world.device)
    for module in model.modules() if setting.batch_norm_policy == "sync" else ():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
    return model


def apply_strategy(
    setting: VerificationSetup, strategy: str, optimizer: str, model: nn.Module
) -> tuple[Strategy, Iterator[list[MicroBatch]]]:
    """This rank's replica of `model`, and its batches (a collective).

    Pass a model with a different seed on each rank. Only the broadcast from rank 0, which has the seed of the run,
    makes them equal.
    """
    spec, world, maker = setting.spec, setting.world, optimizer_factory(optimizer, setting.task, model)
    if spec.checkpoint_activations:
        checkpoint_activations(model, spec.checkpoint_activations)
    merged = setting.batch_norm_policy == "sync"
    if merged:
        model = convert_sync_batchnorm(model, new_group())
    loading, data = LoadingOptions(world.device, 0, setting.task.collate), world.data
    model.train()
    config = ParallelConfig(strategy, schedule=spec.schedule_pipeline, sequence_parallel=spec.sequence_parallel)
    sharing = parallelize_model(setting.task, model, setting.dataset, loading, setting.plan, world, config)
    replica = sharing.make_strategy(STRATEGIES[strategy], model, maker, world, spec.virtual_ranks)
    _add_schedule(optimizer, setting.task, replica.optimizer, spec.steps)
    replica.model.train()
    share = data.share(spec.virtual_ranks)
    batches = load_steps(setting.dataset, setting.plan, share, loading, start=0, stop=spec.steps, merged=merged)
    return replica, batches


def has_dropout(model: nn.Module) -> bool:
    return any(isinstance(m, _DropoutNd) and m.p > 0 for m in model.modules())


def make_world(device: str) -> World:
    """The world of this rank, with gloo if several ranks use the same GPU."""
    world = World.from_env(device=device, backend="gloo")
    needs_gloo = world.device.type == "cpu" or world.local_size > torch.accelerator.device_count()
    return world if needs_gloo else World.from_env(device=device)


@dataclass
class StrategyTrial:
    """A strategy under verification: its replica, its batches, and the records of its last step."""

    case: StrategyCase
    replica: Strategy
    batches: Iterator[list[MicroBatch]]
    comparison: ErrorTracker
    first_start_difference: str | None = None
    """A parameter that differs between ranks, or from one process, before the first step."""
    step_values: StepValues = field(default_factory=StepValues)
    """The record of the current step: random streams, and on rank 0 the gradients before and after clipping."""
    gradient_fingerprints: dict[str, int] = field(default_factory=dict[str, int])
    finding: Divergence | None = None
    unsharded_tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The parameters and buffers of the unsharded model, on the meta device."""


def make_trial(case: StrategyCase, setting: VerificationSetup, optimizer: OptimizerInfo) -> StrategyTrial:
    model = _model(setting, setting.spec.seed + setting.world.rank)
    tensors = (*model.named_parameters(), *model.named_buffers())
    shapes = {name: torch.empty_like(t, device="meta", requires_grad=t.requires_grad) for name, t in tensors}
    replica, batches = apply_strategy(setting, case.strategy, case.optimizer, model)
    trial = StrategyTrial(
        case, replica, batches, ErrorTracker(adaptive=optimizer.is_adaptive), unsharded_tensors=shapes
    )
    _install_observers(trial)
    return trial


def make_reference(setting: VerificationSetup, optimizer: str) -> Reference:
    task, spec = setting.task, setting.spec
    model = _model(setting, spec.seed)
    optim = optimizer_factory(optimizer, task, model)(model.parameters())
    _add_schedule(optimizer, task, optim, spec.steps)
    union = setting.batch_norm_policy == "sync"
    return Reference(task, model, optim, setting.dataset, setting.plan.global_batch, spec, joins_virtual_ranks=union)


def _install_observers(trial: StrategyTrial) -> None:
    """Record each random stream, and the gradients before clipping."""
    inner = trial.replica
    right_enter, right_clip = inner.enter, inner.clip_grad_norm

    def enter(batch: MicroBatch, is_last: bool) -> None:
        right_enter(batch, is_last)
        # with "sync" one forward computes all virtual ranks of a rank, and draws no random number
        if batch.work.is_counted and trial.case.batchnorm != "sync":
            key = f"{batch.work.virtual_rank}.{batch.work.micro_batch}"
            trial.step_values.stream_fingerprints[key] = cpu_rng_fingerprint()

    def clip_grad_norm(max_norm: float) -> Deferred[float]:
        # not in sync_gradients: hooks on parameters run after it
        gradients = full_gradients(inner)
        trial.gradient_fingerprints = tensor_checksums(gradients)
        if inner.world.rank == 0:
            trial.step_values.gradients = {n: g.clone() for n, g in gradients.items()}
        return right_clip(max_norm)

    def before_step(*_: object) -> None:
        trial.step_values.applied_gradients = full_gradients(inner)

    inner.optimizer.register_step_pre_hook(before_step)
    vars(inner).update(enter=enter, clip_grad_norm=clip_grad_norm)


def compare_initial_parameters(trial: StrategyTrial, reference: Reference | None) -> None:
    """Compare the parameters before the first step, over ranks and on rank 0 with one process (a collective)."""
    world, parameters = trial.replica.world, full_parameters(trial.replica)
    trial.first_start_difference = _first_difference(tensor_checksums(parameters), world)
    if trial.first_start_difference is None:
        want = dict(reference.model.named_parameters()) if reference else {}
        unequal = [name for name, value in parameters.items() if name in want and not torch.equal(value, want[name])]
        trial.first_start_difference = next(iter(all_gather_object(unequal[:1], world)[0]), None)


def collect_step_values(
    trial: StrategyTrial, result: StepResult, microbatches: Sequence[MicroBatch]
) -> tuple[StepValues, RankDifferences]:
    """The values of the trial's last step, over all ranks (a collective)."""
    replica, world, got, trial.step_values = trial.replica, trial.replica.world, trial.step_values, StepValues()
    # the ranks of one model copy have the same samples: only its first rank counts
    works = [b.work for b in microbatches if b.work.is_counted and world.is_replica_leader]
    samples = [i for work in works for i in work.indices.tolist()]
    got.samples = sorted(i for rank_samples in all_gather_object(samples, world) for i in rank_samples)
    got.stream_fingerprints = {
        k: v for part in all_gather_object(got.stream_fingerprints, world) for k, v in part.items()
    }
    got.scalars = {"loss": result.loss, "weight": result.total_weight, "gradient norm": result.grad_norm or 0.0}
    got.parameters = parameters = full_parameters(replica)
    with replica.use_merged_buffers():
        got.buffers = buffers = {n: b.detach() for n, b in replica.model.named_buffers()}
        if replica.pipeline is not None:  # the model has only the buffers of this stage
            got.buffers = buffers = {
                n: t for n, t in replica.weights().items() if n in trial.unsharded_tensors and n not in parameters
            }
    got.state = _optimizer_state(replica, trial.unsharded_tensors)
    gradients_differ = _first_difference(trial.gradient_fingerprints, world)
    after_differs = _first_difference(tensor_checksums({**parameters, **buffers}), world)
    return got, RankDifferences(trial.first_start_difference, gradients_differ, after_differs)


def _optimizer_state(replica: Strategy, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer state as in reference.optimizer_state, unsharded (a collective)."""
    state: dict[str, Tensor] = {}
    shards = [shard for shard in replica.state() if shard.name.startswith("optimizer/")]
    for full_name, value in gather_full_state(shards, replica.world).items():
        name, _, key = full_name.removeprefix("optimizer/").rpartition("/")
        if value.shape == parameters[name].shape:
            state[f"{key} of {name}"] = value
    return state


def _first_difference(local: Mapping[str, int], world: World) -> str | None:
    checksums_by_rank = all_gather_object(dict(local), world)
    names = dict.fromkeys(name for checksums in checksums_by_rank for name in checksums)
    return next((name for name in names if len({checksums.get(name) for checksums in checksums_by_rank}) > 1), None)


def digest_weights_and_state(replica: Strategy) -> tuple[str, str]:
    with replica.use_merged_buffers():
        weights = hash_tensors(replica.weights())
    return weights, hash_tensors(gather_full_state(replica.state(), replica.world))


def tensor_checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    flat = {name: tensor.detach().cpu().contiguous().reshape(-1) for name, tensor in tensors.items()}
    return {n: zlib.crc32(f.view(torch.uint8).numpy()) for n, f in flat.items()}  # pyright: ignore[reportArgumentType]


def full_parameters(replica: Strategy) -> dict[str, Tensor]:
    """All unsharded parameters, by name (a collective if they are sharded). Not copies: use before the next step."""
    if not replica.sharded:
        return {name: parameter.detach() for name, parameter in replica.model.named_parameters()}
    shards = [shard for shard in replica.state() if shard.name.startswith(PARAMETER)]
    return {name.removeprefix(PARAMETER): tensor for name, tensor in gather_full_state(shards, replica.world).items()}


def full_gradients(replica: Strategy) -> dict[str, Tensor]:
    """All unsharded gradients of the step, by name (a collective if they are sharded). Not copies."""
    shards = replica.gradients()
    if replica.sharded:
        return gather_full_state(shards, replica.world)
    return {shard.name: shard.tensor for shard in shards}
