"""Pipeline parallelism: each rank holds a stage, which is a contiguous group of layers.

A stage is a model with fewer parameters and buffers. A strategy trains it on the ranks along data that hold the same
stage. This module adds the communication between stages: several stages may use a parameter (an embedding that is also
the output layer). Each of them holds it, and its gradient is the sum of theirs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.export import saved_names_by_state_dict_name, state_dict_names_by_saved_name
from paceline.checkpoint.shards import find_parameter_of_tensor, gather_full_state
from paceline.checkpoint.state import TensorShard
from paceline.collectives.buckets import PackedBucket
from paceline.collectives.control import Deferred, all_gather_object, raise_on_all_ranks
from paceline.collectives.torch_collectives import tag_collective
from paceline.parallel.partition import LayerChain, LayerCost, choose_split_points
from paceline.parallel.pipeline import Pipeline, Schedule, SplitPoint
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.model_parallel import WholeModelView
from paceline.strategies.optimizer_scope import find_update_scope
from paceline.strategies.optimizers import each_optimizer


class StagePlan(msgspec.Struct, frozen=True):
    """A model as a chain of layers, and the numbers of the split points between stages."""

    chain: LayerChain
    ends: list[int]

    @property
    def split_points(self) -> list[SplitPoint]:
        return [self.chain.points[end] for end in self.ends]

    @property
    def stage_costs(self) -> list[LayerCost]:
        bounds = [0, *(end + 1 for end in self.ends), len(self.chain.layers)]
        return [sum(self.chain.layers[a:b], LayerCost()) for a, b in pairwise(bounds)]

    @property
    def stages_by_tensor(self) -> dict[str, tuple[int, ...]]:
        stage_of = [sum(end < number for end in self.ends) for number in range(len(self.chain.layers))]
        return {name: tuple(sorted({stage_of[number] for number in used})) for name, used in self.chain.users.items()}


def plan_stages(make_chain: Callable[[], LayerChain], stages: int, names: Sequence[str], world: World) -> StagePlan:
    """The stages that rank 0 chooses (a collective). `names`: see `choose_split_points`."""
    plan = None
    with raise_on_all_ranks(world):
        if world.rank == 0:
            chain = make_chain()
            plan = msgspec.to_builtins(StagePlan(chain, choose_split_points(chain, stages, names)))
    return msgspec.convert(all_gather_object(plan, world)[0], StagePlan)


def make_stage_strategy(
    strategy: Callable[..., Strategy],
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    world: World,
    plan: StagePlan,
    /,
    *,
    schedule: Schedule = "1f1b",
    virtual_ranks: int | None = None,
) -> Strategy:
    """This rank's stage of `model`, trained by `strategy` on the ranks of `world.data` (a collective).

    Memory of each rank, for P parameters in S equal stages: P/S weights, gradients and optimizer state. `model` is
    whole and equal on all ranks. Afterwards the parameters and buffers of other stages are shapes (meta tensors).
    """
    points, users = plan.split_points, plan.stages_by_tensor
    number = world.along("pipeline").rank
    names, called = state_dict_names_by_saved_name(model), saved_names_by_state_dict_name(model)
    _move_to_meta(model, {name for name, stages in users.items() if number not in stages})
    pipeline = Pipeline(world, model, points, draws=plan.chain.draws, schedule=schedule, names=names, called=called)
    if number:
        pipeline.stage.skip([model.get_submodule(name) for name in points[number - 1].before])

    def make_for_stage(parameters: Any) -> Optimizer:
        optimizer, of_stage = make_optimizer(parameters), {*model.parameters()}
        for one in each_optimizer(optimizer):
            find_update_scope(one, "a pipeline")
        for group in optimizer.param_groups:  # the task may have created it for the whole model
            group["params"] = [p for p in group["params"] if p in of_stage]
        return optimizer

    def is_elsewhere(full: str) -> bool:
        return users[find_parameter_of_tensor(full, users) or full.rpartition("/")[2]][0] != number

    replica = strategy(model, make_for_stage, world.data, virtual_ranks=virtual_ranks)
    shared = _shared_parameters(dict(model.named_parameters()), users, world)
    replica.join(_Stage(model, world, is_elsewhere, called, shared), world)
    replica.pipeline = pipeline
    return replica


class _Stage(WholeModelView):
    """A stage. The gradient of a parameter in several stages is the sum over these stages."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        is_elsewhere: Callable[[str], bool],
        called: Mapping[str, str],
        shared: Sequence[tuple[Any, list[nn.Parameter]]],
    ) -> None:
        super().__init__(model, world, {}, is_elsewhere)
        self._called = called
        self._shared = [(group, parameters, PackedBucket(parameters)) for group, parameters in shared]

    def after_reduction(self, finite: bool | Deferred[bool] | None) -> None:
        for group, parameters, bucket in self._shared:
            flat = bucket.pack([p.grad for p in parameters])
            dist.all_reduce(tag_collective(flat, "gradients of shared parameters"), group=group)
            bucket.unpack(flat, [p.grad is not None for p in parameters])

    def weights(
        self, weights: Callable[[], Mapping[str, Tensor]], state: Callable[[], list[TensorShard]]
    ) -> Mapping[str, Tensor]:
        shards = [shard for shard in self.as_shards_of_whole(state()) if shard.name.startswith("model/")]
        for name, buffer in self._model.named_buffers():
            is_spare = self._world.data.rank > 0 or self._is_elsewhere(name)
            shards.append(TensorShard(f"model/{name}", buffer, replicated=False, is_saved_elsewhere=is_spare))
        full_tensors = gather_full_state(shards, self._world)
        return {name: full_tensors[f"model/{first}"] for name, first in self._called.items() if first}


def _move_to_meta(model: nn.Module, names: Collection[str]) -> None:
    state = dict([*model.named_parameters(), *model.named_buffers()])
    shapes = {id(state[name]): state[name].detach().to("meta") for name in names}
    for owner in model.modules():
        for tensors in (owner._parameters, owner._buffers):  # pyright: ignore[reportPrivateUsage]
            for leaf, tensor in [*tensors.items()]:
                if id(tensor) in shapes:
                    del tensors[leaf]
                    setattr(owner, leaf, shapes[id(tensor)])


def _shared_parameters(
    of_stage: Mapping[str, nn.Parameter], users: Mapping[str, tuple[int, ...]], world: World
) -> list[tuple[Any, list[nn.Parameter]]]:
    """(process group, parameters of one type) for all parameters that several stages use (a collective)."""
    assert world.mesh is not None
    pipelines = sorted({world.mesh.peers(rank, ("pipeline",)) for rank in range(world.size)})
    groups: list[tuple[Any, list[nn.Parameter]]] = []
    for stages in sorted({stages for stages in users.values() if len(stages) > 1}):
        shared = [p for name, p in of_stage.items() if users[name] == stages and p.requires_grad]
        for ranks in pipelines:  # every rank creates all groups, in the same order
            members = [ranks[stage] for stage in stages]
            group = dist.new_group(members)
            if world.rank in members:
                types = dict.fromkeys(p.dtype for p in shared)
                groups += [(group, [p for p in shared if p.dtype == dtype]) for dtype in types]
    return groups
