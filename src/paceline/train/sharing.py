"""Shares a task's model among ranks, as the mesh says; watched, and tried, on the task's own first samples."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.checkpoint.shards import ShardedParameter
from paceline.collectives.control import gather_words, together, told_once
from paceline.collectives.replicate import broadcast_module
from paceline.config.mesh import OF_MODEL
from paceline.data.loader import Loading, fetch
from paceline.data.plan import BatchPlan, ranks_share
from paceline.errors import UsageError, plural
from paceline.parallel.partition import survey
from paceline.parallel.pipeline import Schedule, idle
from paceline.rank.world import World
from paceline.seeding import random_stream
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.parts import ModelParts
from paceline.strategies.pipelined import Division, divided, pipelined
from paceline.tasks.task import Task, call
from paceline.train.evaluate import evaluating
from paceline.train.step import weighted_losses

SAME = 1e-2  # of the loss: torch may take other kernels where nothing is kept for backward; in bf16 that is seen
TRIED = 2  # samples
FEW = 0.3  # of a step, that equal stages would wait
OfFirst = Callable[[], tuple[Callable[[], Any], Any, Callable[[Any], Tensor]]]
"""Of the first samples: what calls the model, its inputs, and the loss of what it gives."""


@dataclass(frozen=True)
class Wish:
    """What the settings say of it."""

    strategy: str | None = None
    stages_at: str = ""
    schedule: Schedule = "1f1b"
    sequence: bool = False


@dataclass(frozen=True)
class Sharing:
    """How ranks share a model: what they cut of each layer, or where they cut it into stages."""

    cuts: Mapping[str, ShardedParameter] = field(default_factory=dict[str, ShardedParameter])
    division: Division | None = None
    schedule: Schedule = "1f1b"
    lines: Sequence[str] = ()
    """for the user, before the first step"""
    check: Callable[[Strategy], None] = lambda _: None
    """raises UsageError if the model that is shared cannot give the loss of the whole one"""

    def apply(
        self,
        strategy: Callable[..., Strategy],
        model: nn.Module,
        maker: MakeOptimizer,
        world: World,
        virtual_ranks: int,
    ) -> Strategy:
        """Let `strategy` train this rank's part of the model (a collective)."""
        if self.division is None:
            part = strategy(model, maker, world.data, virtual_ranks=virtual_ranks)
            if world.mesh is None or not world.mesh.shares_model:
                part.world = world
            else:
                part.join(ModelParts(model, world, self.cuts), world)
            return part
        made = pipelined(
            strategy, model, maker, world, self.division, schedule=self.schedule, virtual_ranks=virtual_ranks
        )  # fmt: skip
        self.check(made)
        return made


ALONE = Sharing()


def share_model(
    task: Task,
    model: nn.Module,
    dataset: Dataset[Any],
    loading: Loading,
    plan: BatchPlan,
    world: World,
    wish: Wish,
) -> Sharing:
    """Share it as the mesh of `world` says (a collective).

    Raises:
        UsageError: on one rank, if it cannot be shared so; ReportedByPeer on the others.
    """
    if world.backend == "gloo" and world.device.type == "cuda" and any(world.along(n).size > 1 for n in OF_MODEL):
        raise told_once(UsageError(code="mesh-over-gloo", mesh=world.mesh), world)
    loss = partial(_of_first, task, model, dataset, loading)
    if world.along("tensor").size > 1:
        samples = min(TRIED, len(dataset))  # pyright: ignore[reportArgumentType]
        return _cut(task, model, partial(_tried, model, loss), samples, plan, world, wish)
    if world.along("context").size > 1:
        from paceline.parallel.context import share_along_context  # torch's DTensor takes others 0.5 s to import

        return Sharing(lines=share_along_context(model, world, partial(_tried, model, loss)))
    if (stages := world.along("pipeline").size) > 1:
        names, way = [name for name in wish.stages_at.split(",") if name], wish.schedule
        broadcast_module(model)  # whole: stages of models that were drawn apart would make up none
        division = divided(lambda: survey(model, *loss()), stages, names, world)
        check, lines = partial(_compare, _tried(model, loss), loss), division_lines(division, way, plan, world)
        return Sharing(division=division, schedule=way, lines=lines, check=check)
    return ALONE


def _cut(
    task: Task, model: nn.Module, loss: Callable[[], float], samples: int, plan: BatchPlan, world: World, wish: Wish
) -> Sharing:
    """Cut `model` in place along tensor, seeing by the `loss` of the first `samples` that it computes what it did.

    Raises:
        UsageError: as `shard_along_tensor`; or fsdp cannot take what was cut. ReportedByPeer on all ranks but one.
    """
    from paceline.parallel.tensor import shard_along_tensor  # as share_along_context above

    sharding = shard_along_tensor(model, world, task.parallelize, loss, sequence=wish.sequence)
    if wish.strategy == "fsdp" and sharding.used_elsewhere:  # it puts other tensors in the place of these
        words = f"{sharding.used_elsewhere[0]} is sharded, and the model uses it outside its layer"
        advice = "Set it to 'whole' in Task(parallelize=...), or use a different strategy"
        raise told_once(UsageError(code="fsdp-of-used-elsewhere", mesh=world.mesh, reason=words, advice=advice), world)
    lines = sharding.table(model, samples, plan.global_batch // world.data.size)
    along = world.along("tensor")
    if along.local_size < along.size:
        ranks = plural(world.local_size, "rank")
        lines.append(
            "WARNING: ranks along tensor are on several hosts, and all these bytes travel between hosts in each step. "
            f"Let tensor divide the {ranks} of a host, and use data or pipeline between hosts"
        )
    return Sharing(sharding.shards, lines=lines)


def _of_first(
    task: Task, model: nn.Module, dataset: Dataset[Any], loading: Loading
) -> tuple[Callable[[], Any], Any, Callable[[Any], Tensor]]:
    """What an `OfFirst` gives."""
    indices = torch.arange(min(TRIED, len(dataset)))  # pyright: ignore[reportArgumentType]
    ((inputs, targets),) = fetch(dataset, [(0, indices)], 0, loading)

    def loss(outputs: Any) -> Tensor:
        losses, weights = weighted_losses(task.loss, outputs, targets)
        return losses.sum() if weights is None else (losses * weights).sum()

    return partial(call, model, inputs), inputs, loss


def _tried(model: nn.Module, of_first: OfFirst) -> float:
    """The loss of the first samples, in eval mode, where some models draw, too; with a graph, as a step has it."""
    with random_stream(0, next(model.parameters()).device), evaluating(model), torch.enable_grad():
        forward, _, loss = of_first()
        return float(loss(forward()).detach())


def _compare(expected: float, of_first: OfFirst, made: Strategy) -> None:
    line, world, got = made.pipeline, made.world, expected
    assert line is not None
    with random_stream(0, world.device), evaluating(made.model):
        forward, _, loss = of_first()
        run = line.stage.forward(forward)
        line.settle()
    with together(world):
        if line.is_last:
            got = float(loss(run.result))
        if not math.isclose(got, expected, rel_tol=SAME):
            raise UsageError(code="stages-change-loss", stages=line.stages, got=got, expected=expected)


def division_lines(division: Division, schedule: Schedule, plan: BatchPlan, world: World) -> list[str]:
    """A line for each stage: where it begins, what it weighs, and how long it will wait."""
    stages = division.stages
    most = len(ranks_share(plan.virtual_ranks, 0, world.data.size)) * plan.accumulation
    waits = idle(schedule, [(one.forward_seconds, one.backward_seconds) for one in stages], most)
    whole = sum(one.seconds for one in stages)
    lines = [f"pipeline of {plural(len(stages), 'stage')}, {schedule}, {plural(most, 'micro-batch', 'micro-batches')}"]
    for number, (one, begin, wait) in enumerate(
        zip(stages, ["", *(cut.module for cut in division.cuts)], waits, strict=True)
    ):
        place = f"stage {number} {f'from {begin}' if begin else 'from the input'}"
        share = f"{one.seconds / whole:.0%} of the time" if whole else "no time"
        state = f"{one.state_bytes / 2**20:,.1f} MiB of weights, gradients and optimizer state"
        lines.append(f"  {place}: {share}, {state}; will wait {wait:.0%} of a step")
    if (len(stages) - 1) / (most + len(stages) - 1) > FEW:
        lines[0] += ": few micro-batches for so many stages. Try: --accumulation with a greater number"
    return lines


def waited_line(seconds: Sequence[float], world: World) -> str:
    """How long the stages have waited: of each rank's `seconds`, (waiting, in all) (a collective)."""
    told = gather_words([world.along("pipeline").rank, *seconds], world)
    shares: dict[int, list[float]] = {}
    for stage, waited, spent in told:
        shares.setdefault(stage, []).append(waited / spent if spent else 0.0)
    of_stages = {stage: sum(found) / len(found) for stage, found in shares.items()}
    slowest = min(of_stages, key=lambda stage: of_stages[stage])
    words = ", ".join(f"stage {stage} {share:.0%}" for stage, share in sorted(of_stages.items()))
    return f"waited for other ranks: {words} of the time; stage {slowest} is the slowest"
