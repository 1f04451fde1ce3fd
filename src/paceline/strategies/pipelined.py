"""Pipeline parallelism: a rank holds a stretch of the layers only, its stage, and micro-batches flow through all.

A stage is a model with fewer parameters and buffers: strategies train it among the ranks along data that hold the same
one, and know of no other. What is of all stages is added here: a parameter that several use (an embedding that is the
output layer as well) is held by each of them, and its gradient is the sum of theirs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from paceline.checkpoint.export import state_names
from paceline.checkpoint.shards import parameter_of, whole
from paceline.checkpoint.state import TensorShard
from paceline.collectives.buckets import pack, unpack
from paceline.collectives.control import Pending, gather_words, together
from paceline.collectives.torch_collectives import labelled
from paceline.errors import UsageError
from paceline.parallel.partition import Chain, Layers, best_splits
from paceline.parallel.pipeline import Pipeline, Schedule, SplitPoint
from paceline.rank.world import World
from paceline.strategies.base import MakeOptimizer, Strategy
from paceline.strategies.parts import ModelParts


class Division(msgspec.Struct, frozen=True):
    """A model, and where it is cut: numbers of its cuts."""

    found: Chain
    ends: list[int]

    @property
    def cuts(self) -> list[SplitPoint]:
        """Those between the stages."""
        return [self.found.points[end] for end in self.ends]

    @property
    def stages(self) -> list[Layers]:
        """Each as a whole."""
        places = [0, *(end + 1 for end in self.ends), len(self.found.layers)]
        return [sum(self.found.layers[a:b], Layers()) for a, b in pairwise(places)]

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """By parameter and buffer the stages that use it."""
        stage_of = [sum(end < number for end in self.ends) for number in range(len(self.found.layers))]
        return {name: tuple(sorted({stage_of[number] for number in used})) for name, used in self.found.users.items()}


def divided(make: Callable[[], Chain], stages: int, names: Sequence[str], world: World) -> Division:
    """Where rank 0 cuts its model (a collective); `names` as in `best_splits`.

    Raises:
        UsageError: on one rank, as `best_splits`, or a forward or backward has failed; ReportedByPeer on the others.
    """
    mine = None
    with together(world):
        if world.rank == 0:
            found = make()
            mine = msgspec.to_builtins(Division(found, best_splits(found, stages, names)))
    return msgspec.convert(gather_words(mine, world)[0], Division)


def pipelined(
    strategy: Callable[..., Strategy],
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    world: World,
    division: Division,
    /,
    *,
    schedule: Schedule = "1f1b",
    virtual_ranks: int | None = None,
) -> Strategy:
    """This rank's stage of `model`, trained by `strategy` (a collective).

    Memory of each rank, for P parameters in S equal stages: P/S weights, gradients and optimizer state.

    Args:
        strategy: which trains a model among the ranks of `world.data`.
        model: whole, the same on all ranks, on the world's device; of other stages only shapes stay in it.
        make_optimizer: makes the optimizer from the parameters; each is updated whole, where it is held.
        world: all ranks, laid out in a mesh.
        division: where the model is cut.
        schedule: see `parallel.pipeline.actions`.
        virtual_ranks: see MakeStrategy.

    Raises:
        UsageError: for an optimizer that looks at all parameters at once.
    """
    cuts, holders = division.cuts, division.holders
    number = world.along("pipeline").rank
    names, called = state_names(model), _called(model)
    _forget(model, {name for name, stages in holders.items() if number not in stages})
    line = Pipeline(world, model, cuts, draws=division.found.draws, schedule=schedule, names=names, called=called)
    if number:
        line.stage.skip([model.get_submodule(name) for name in cuts[number - 1].before])

    def make_own(parameters: Any) -> Optimizer:
        optimizer, own = make_optimizer(parameters), {*model.parameters()}
        if isinstance(optimizer, LBFGS):
            raise UsageError(code="optimizer-looks-at-all")
        for group in optimizer.param_groups:  # the task may have made it, of the whole model
            group["params"] = [p for p in group["params"] if p in own]
        return optimizer

    def is_elsewhere(full: str) -> bool:
        return holders[parameter_of(full, holders) or full.rpartition("/")[2]][0] != number

    part = strategy(model, make_own, world.data, virtual_ranks=virtual_ranks)
    part.join(
        _Stage(model, world, is_elsewhere, called, _shared(dict(model.named_parameters()), holders, world)), world
    )
    part.pipeline = line
    return part


class _Stage(ModelParts):
    """One stage. A parameter that several stages have gets the sum of its gradients in all of them."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        is_elsewhere: Callable[[str], bool],
        called: Mapping[str, str],
        shared: Sequence[tuple[Any, list[nn.Parameter]]],
    ) -> None:
        """`called`: what each tensor is saved as; `shared`: groups of stages with the parameters that they share."""
        super().__init__(model, world, {}, is_elsewhere)
        self._called, self._shared = called, shared

    def after_reduction(self, finite: bool | Pending[bool] | None) -> None:
        """See ModelParts."""
        for group, parameters in self._shared:
            flat = pack(parameters, [p.grad for p in parameters])
            dist.all_reduce(labelled(flat, "gradients of shared parameters"), group=group)
            unpack(flat, parameters, [p.grad is not None for p in parameters])

    def weights(
        self, weights: Callable[[], Mapping[str, Tensor]], state: Callable[[], list[TensorShard]]
    ) -> Mapping[str, Tensor]:
        """See ModelParts."""
        held = [one for one in self.lifted(state()) if one.name.startswith("model/")]
        for name, buffer in self._model.named_buffers():
            again = self._world.data.rank > 0 or self._is_elsewhere(name)
            held.append(TensorShard(f"model/{name}", buffer, replicated=False, spare=again))
        found = whole(held, self._world)
        return {name: found[f"model/{first}"] for name, first in self._called.items()}


def _called(model: nn.Module) -> dict[str, str]:
    """By its name in the state_dict, what a tensor is saved as: one that is tied has several."""
    first = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return {name: first[id(tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}


def _forget(model: nn.Module, names: Collection[str]) -> None:
    """Let go of these parameters and buffers: in their places are shapes, which belong to no state."""
    state = dict([*model.named_parameters(), *model.named_buffers()])
    shapes = {id(state[name]): state[name].detach().to("meta") for name in names}
    for owner in model.modules():
        for there in (owner._parameters, owner._buffers):  # pyright: ignore[reportPrivateUsage]
            for leaf, tensor in [*there.items()]:
                if id(tensor) in shapes:
                    del there[leaf]
                    setattr(owner, leaf, shapes[id(tensor)])


def _shared(
    own: Mapping[str, nn.Parameter], holders: Mapping[str, tuple[int, ...]], world: World
) -> list[tuple[Any, list[nn.Parameter]]]:
    """The parameters that other stages of this pipeline have, too, by type, with the group of those (a collective)."""
    assert world.mesh is not None
    pipelines = sorted({world.mesh.peers(rank, ("pipeline",)) for rank in range(world.size)})
    found: list[tuple[Any, list[nn.Parameter]]] = []
    for stages in sorted({stages for stages in holders.values() if len(stages) > 1}):
        there = [p for name, p in own.items() if holders[name] == stages and p.requires_grad]
        for ranks in pipelines:  # every rank makes all groups, in one order
            members = [ranks[stage] for stage in stages]
            group = dist.new_group(members)
            if world.rank in members:
                found += [
                    (group, [p for p in there if p.dtype == kind]) for kind in dict.fromkeys(p.dtype for p in there)
                ]
    return found
