"""Shards or splits the model of a task over the ranks of a mesh. It is traced and checked with the first samples."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from paceline.checkpoint.shards import ParameterShard
from paceline.collectives.control import all_gather_object, error_on_one_rank, raise_on_all_ranks
from paceline.collectives.replicate import broadcast_module
from paceline.config.mesh import MODEL_DIMENSIONS
from paceline.data.loader import LoadingOptions, fetch_inputs_and_targets
from paceline.data.plan import BatchPlan
from paceline.errors import UsageError, plural
from paceline.parallel.partition import profile_chain
from paceline.parallel.pipeline import Schedule, idle_fractions
from paceline.rank.world import World
from paceline.seeding import fork_rng_with_seed
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.model_parallel import WholeModelView
from paceline.strategies.optimizer_scope import find_update_scope
from paceline.strategies.optimizers import each_optimizer, parameters_by_optimizer
from paceline.strategies.pipelined import StagePlan, make_stage_strategy, plan_stages
from paceline.tasks.task import Task, call_model
from paceline.train.evaluate import eval_mode
from paceline.train.step import weighted_loss_sum

LOSS_TOLERANCE = 1e-2  # relative; without a backward graph torch can use different kernels, which shows in bf16
TRIAL_SAMPLES = 2
LONG_IDLE_FRACTION = 0.3  # of a step, for stages of equal duration
Trial = Callable[[], tuple[Callable[[], Any], Any, Callable[[Any], Tensor]]]
"""Returns, for the first samples: a function that calls the model, its inputs, and a function (output) -> loss."""


@dataclass(frozen=True)
class ParallelConfig:
    strategy: str | None = None
    stages_at: str = ""
    schedule: Schedule = "1f1b"
    sequence_parallel: bool = False


@dataclass(frozen=True)
class ModelParallelPlan:
    """How the ranks divide a model: the shards of its parameters, or its pipeline stages."""

    shards: Mapping[str, ParameterShard] = field(default_factory=dict[str, ParameterShard])
    stage_plan: StagePlan | None = None
    schedule: Schedule = "1f1b"
    notices: Sequence[str] = ()
    """Lines for the user, before the first step."""
    check_trial_loss: Callable[[Strategy], None] = lambda _: None
    """Raises UsageError if the divided model does not give the loss of the full model."""

    def make_strategy(
        self, strategy: Callable[..., Strategy], model: nn.Module, maker: MakeOptimizer, world: World,
        virtual_ranks: int,
    ) -> Strategy:  # fmt: skip
        if self.stage_plan is None:
            checked = partial(_make_for_shards, maker, model, self.shards) if self.shards else maker
            part = strategy(model, checked, world.data, virtual_ranks=virtual_ranks)
            if world.mesh is None or not world.mesh.has_model_parallelism:
                part.world = world
            else:
                part.join(WholeModelView(model, world, self.shards), world)
            return part
        replica = make_stage_strategy(
            strategy, model, maker, world, self.stage_plan, schedule=self.schedule, virtual_ranks=virtual_ranks
        )  # fmt: skip
        self.check_trial_loss(replica)
        return replica


def _make_for_shards(
    maker: MakeOptimizer, model: nn.Module, shards: Mapping[str, ParameterShard], parameters: Iterable[nn.Parameter]
) -> Optimizer:
    optimizer = maker(parameters)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for opt, trained in zip(each_optimizer(optimizer), parameters_by_optimizer(optimizer), strict=True):
        sharded = next((names[p] for p in trained if names.get(p) in shards), None)
        if sharded is not None and find_update_scope(opt, "tensor parallelism") == "parameter":
            raise UsageError(code="optimizer-needs-whole", kind=type(opt).__name__, name=sharded)
    return optimizer


def parallelize_model(
    task: Task, model: nn.Module, dataset: Dataset[Any], loading: LoadingOptions, plan: BatchPlan, world: World,
    config: ParallelConfig,
) -> ModelParallelPlan:  # fmt: skip
    """Divide the model along the dimensions of the mesh of `world` (collective)."""
    if (
        world.backend == "gloo"
        and world.device.type == "cuda"
        and any(world.along(n).size > 1 for n in MODEL_DIMENSIONS)
    ):
        raise error_on_one_rank(UsageError(code="mesh-over-gloo", mesh=world.mesh), world)
    trial = partial(_first_samples, task, model, dataset, loading)
    if world.along("tensor").size > 1:
        samples = min(TRIAL_SAMPLES, len(dataset))  # pyright: ignore[reportArgumentType]
        return _shard_layers(task, model, partial(_trial_loss, model, trial), samples, plan, world, config)
    if world.along("context").size > 1:
        from paceline.parallel.context import apply_context_parallel  # imports DTensor, which takes 0.5 s

        return ModelParallelPlan(notices=apply_context_parallel(model, world, partial(_trial_loss, model, trial)))
    if (stages := world.along("pipeline").size) > 1:
        names, schedule = [name for name in config.stages_at.split(",") if name], config.schedule
        broadcast_module(model)  # so that the stages of all ranks belong to one model
        division = plan_stages(lambda: profile_chain(model, *trial()), stages, names, world)
        check = partial(_check_loss, _trial_loss(model, trial), trial)
        lines = format_stages(division, schedule, plan, world)
        return ModelParallelPlan(stage_plan=division, schedule=schedule, notices=lines, check_trial_loss=check)
    return ModelParallelPlan()


def _shard_layers(
    task: Task, model: nn.Module, loss: Callable[[], float], samples: int, plan: BatchPlan, world: World,
    config: ParallelConfig,
) -> ModelParallelPlan:  # fmt: skip
    """Shard the layers in place along tensor. The `loss` of the first `samples` samples must not change."""
    from paceline.parallel.tensor import apply_tensor_parallel  # imports DTensor

    sharding = apply_tensor_parallel(model, world, task.parallelize, loss, sequence=config.sequence_parallel)
    if config.strategy == "fsdp" and sharding.used_elsewhere:  # fsdp replaces these parameters by other tensors
        reason = f"{sharding.used_elsewhere[0]} is sharded, and the model uses it outside its layer"
        advice = "Set it to 'whole' in Task(parallelize=...), or use a different strategy"
        error = UsageError(code="fsdp-of-used-elsewhere", mesh=world.mesh, reason=reason, advice=advice)
        raise error_on_one_rank(error, world)
    lines = sharding.format_table(model, samples, plan.global_batch // world.data.size)
    tensor_group = world.along("tensor")
    if tensor_group.local_size < tensor_group.size:
        ranks = plural(world.local_size, "rank")
        lines.append(
            "WARNING: ranks along tensor are on several nodes, so each step sends all these bytes between nodes. "
            f"Choose a size of tensor that divides the {ranks} of a node, and use data or pipeline between nodes"
        )
    return ModelParallelPlan(sharding.shards, notices=lines)


def _first_samples(
    task: Task, model: nn.Module, dataset: Dataset[Any], loading: LoadingOptions
) -> tuple[Callable[[], Any], Any, Callable[[Any], Tensor]]:
    indices = torch.arange(min(TRIAL_SAMPLES, len(dataset)))  # pyright: ignore[reportArgumentType]
    ((inputs, targets),) = fetch_inputs_and_targets(dataset, [(0, indices)], 0, loading)
    return partial(call_model, model, inputs), inputs, partial(weighted_loss_sum, task.loss, targets=targets)


def _trial_loss(model: nn.Module, trial: Trial) -> float:
    """The loss of the first samples in eval mode, with a graph as in a step. Some models use random numbers in it."""
    with fork_rng_with_seed(0, next(model.parameters()).device), eval_mode(model), torch.enable_grad():
        forward, _, loss = trial()
        return float(loss(forward()).detach())


def _check_loss(expected: float, trial: Trial, replica: Strategy) -> None:
    pipeline, world, actual = replica.pipeline, replica.world, expected
    assert pipeline is not None
    with fork_rng_with_seed(0, world.device), eval_mode(replica.model):
        forward, _, loss = trial()
        run = pipeline.stage.forward(forward)
        pipeline.wait_for_sends()
    with raise_on_all_ranks(world):
        if pipeline.is_last:
            actual = float(loss(run.result))
        if not math.isclose(actual, expected, rel_tol=LOSS_TOLERANCE):
            raise UsageError(code="stages-change-loss", stages=pipeline.stages, got=actual, expected=expected)


def format_stages(division: StagePlan, schedule: Schedule, plan: BatchPlan, world: World) -> list[str]:
    stages = division.stage_costs
    micro_batches = len(world.data.shares(plan.virtual_ranks)[0]) * plan.accumulation
    waits = idle_fractions([stage.seconds for stage in stages], micro_batches)
    total = sum(stage.seconds for stage in stages)
    count = plural(micro_batches, "micro-batch", "micro-batches")
    lines = [f"pipeline of {plural(len(stages), 'stage')}, {schedule}, {count}"]
    first_modules = ["", *(cut.module for cut in division.split_points)]
    for number, (stage, module, wait) in enumerate(zip(stages, first_modules, waits, strict=True)):
        begin = f"stage {number} {f'from {module}' if module else 'from the input'}"
        portion = f"{stage.seconds / total:.0%} of the time" if total else "no time"
        state = f"{stage.state_bytes / 2**20:,.1f} MiB of weights, gradients and optimizer state"
        lines.append(f"  {begin}: {portion}, {state}; will wait {wait:.0%} of a step")
    if (len(stages) - 1) / (micro_batches + len(stages) - 1) > LONG_IDLE_FRACTION:
        lines[0] += ". WARNING: too few micro-batches to keep all stages busy. Increase --accumulation"
    return lines


def stage_wait_line(seconds: Sequence[float], world: World) -> str:
    """A line with the waiting time of each stage (collective). `seconds` of this rank: (waiting, in total)."""
    by_stage: dict[int, list[float]] = {}
    for stage, waited, total in all_gather_object([world.along("pipeline").rank, *seconds], world):
        by_stage.setdefault(stage, []).append(waited / total if total else 0.0)
    means = {stage: sum(fractions) / len(fractions) for stage, fractions in by_stage.items()}
    slowest = min(means, key=lambda stage: means[stage])
    text = ", ".join(f"stage {stage} {fraction:.0%}" for stage, fraction in sorted(means.items()))
    return f"waited for other ranks: {text} of the time; stage {slowest} is the slowest"
