"""Tensor parallelism: every rank keeps its shard of each layer that the plan names, and computes with it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from paceline.checkpoint.shards import ShardedParameter
from paceline.collectives.control import together
from paceline.collectives.replicate import broadcast_module
from paceline.compute.forward import around_forward
from paceline.errors import UsageError, first_few
from paceline.parallel import layers
from paceline.parallel.dtensor import InputCache, LayerCommunication, full_tensor
from paceline.parallel.dtensor_mode import DTensorMode
from paceline.parallel.logits import to_caller
from paceline.parallel.tensor_plan import ShardedLayer, find_plan, shards_of
from paceline.rank.world import World

MEGA = 1e6
LOSS_TOLERANCE = 1e-2  # in bf16 another order of a sum makes such a difference


@dataclass
class TensorSharding:
    """A model that is sharded along tensor."""

    plan: Mapping[str, ShardedLayer]
    shards: Mapping[str, ShardedParameter]
    ranks: int
    used_elsewhere: list[str] = field(default_factory=list[str])
    """sharded parameters that code outside their layers has used in a forward so far"""
    sent: dict[str, int] = field(default_factory=dict[str, int])
    """by layer: bytes that its forwards so far, and their backwards, have passed to all-reduces"""

    def count(self, layer: str, size: int) -> None:
        """Add to `sent`."""
        self.sent[layer] = self.sent.get(layer, 0) + size

    def table(self, model: nn.Module, samples: int, of_step: int) -> list[str]:
        """For the user: how layers are sharded, and what a rank sends in a step; `sent` is of `samples` samples."""
        rows = [("parameters", "shape", "cut", "bytes a step")]
        layers_of: dict[tuple[str, str, str], list[str]] = {}
        for name, layer in self.plan.items():
            own = {id(p) for p in model.get_submodule(name).parameters()}  # one that is tied has another name
            weight = next(n for n in self.shards if n.startswith(f"{name}.") or id(model.get_parameter(n)) in own)
            shard = self.shards[weight]
            pattern = ".".join("*" if word.isdigit() else word for word in name.split("."))
            key = (pattern, str(tuple(shard.whole)), f"{layer.way}, {tuple(shard.shape)} each")
            layers_of.setdefault(key, []).append(name)
        for (pattern, shape, way), names in layers_of.items():
            many = f" ({len(names)} layers)" if len(names) > 1 else ""
            size = sum(self.sent.get(name, 0) * of_step // max(1, samples) for name in names)
            rows.append((pattern + many, shape, way, f"{size / MEGA:.3g} MB"))
        widest = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  " + "  ".join(word.ljust(w) for word, w in zip(row, (*widest, 0), strict=True)).rstrip() for row in rows
        ]
        return [f"cut over {self.ranks} ranks along tensor:", *lines, self._memory(model)]

    def _memory(self, model: nn.Module) -> str:
        whole_by_class: dict[str, int] = {}
        here = whole = 0
        for name, parameter in model.named_parameters():
            shard = self.shards.get(name)
            here += parameter.nbytes
            whole += parameter.nbytes if shard is None else shard.whole.numel() * parameter.element_size()
            if shard is None:
                kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
                whole_by_class[kind] = whole_by_class.get(kind, 0) + parameter.nbytes
        largest_first = sorted(whole_by_class.items(), key=lambda item: -item[1])
        shown = [f"{kind} ({size / MEGA:.3g} MB)" for kind, size in largest_first]
        rest = f"; whole on each of them: {first_few(shown, 6)}" if shown else ""
        return f"  each rank holds {here / MEGA:.3g} of {whole / MEGA:.3g} MB of weights{rest}"


def shard_along_tensor(
    model: nn.Module,
    world: World,
    asked: Callable[[nn.Module], Mapping[str, str]] | None = None,
    probe: Callable[[], float] | None = None,
    *,
    sequence: bool = False,
) -> TensorSharding:
    """Shard `model`, in place, over the ranks along `tensor` (a collective of all ranks).

    Every parameter keeps its identity: an optimizer that was made before still knows them.

    Args:
        model: whole, on every rank.
        world: with a dimension of that name.
        asked: see `Task.parallelize`.
        probe: a loss of the model on a few samples, the same on all ranks: called before and after.
        sequence: between two layers each rank has a part of every sequence.

    Raises:
        ValueError: if the ranks' models differ in names, shapes or types.
        UsageError: see `find_plan`; or the sharded model does not give the loss of the whole one. On one rank,
            ReportedByPeer on the others.
    """
    along = world.along("tensor")
    assert along.group is not None
    broadcast_module(model)  # whole: shards of models with different initial weights would make up none
    with together(world):
        expected = None if probe is None else probe()
        plan = find_plan(model, along.size, None if asked is None else dict(asked(model)))
        shards = shards_of(model, plan, along)
    mesh = DeviceMesh.from_group(along.group, world.device.type)
    sharding = TensorSharding(plan, shards, along.size)
    names = {id(p): name for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, shard in shards.items():
            parameter = model.get_parameter(name)
            parameter.data = shard.part(parameter.data)
    cache = InputCache()
    for name, layer in plan.items():
        comm = LayerCommunication(mesh, partial(sharding.count, name), cache, sequence=sequence)
        _shard_forward(model.get_submodule(name), layer, comm, along)
    mode = DTensorMode(mesh, shards, model)

    def after() -> None:
        cache.clear()
        sharding.used_elsewhere[:] = sorted(names[parameter] for parameter in mode.used_elsewhere)

    run_in_mode(model, mode, after)
    if probe is not None and expected is not None:
        compare_losses(probe, expected, world, "Say in Task(parallelize=...) which layers are cut, or stay whole")
    return sharding


def run_in_mode(model: nn.Module, mode: DTensorMode, after: Callable[[], object] = lambda: None) -> None:
    """Let the model's forwards run in `mode`; `after` is called after each."""

    def forward(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with mode:
                outputs = inner(*args, **kwargs)
        finally:
            after()
        # an evaluation reads the outputs of one of these ranks, and a gather needs all of them
        return tree_map(to_caller if torch.is_grad_enabled() else full_tensor, outputs)

    around_forward(model, forward)


def compare_losses(probe: Callable[[], float], expected: float, world: World, advice: str) -> None:
    """Check that a model that ranks share gives the loss of the whole one (a collective).

    Raises:
        UsageError: it does not. On one rank, ReportedByPeer on the others.
    """
    loss, error = math.nan, None
    try:
        loss = probe()
    except (NotImplementedError, RuntimeError) as caught:  # which of them torch raises depends on the operation
        error = caught
    with together(world):  # also if only some of the ranks have an error
        if error is not None:
            first = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(code="mesh-operation", reason=first, advice=advice) from error
        if not math.isclose(loss, expected, rel_tol=LOSS_TOLERANCE, abs_tol=LOSS_TOLERANCE):
            raise UsageError(code="mesh-loss-differs", loss=loss, expected=expected, advice=advice)


def _shard_forward(module: nn.Module, layer: ShardedLayer, comm: LayerCommunication, along: World) -> None:
    if isinstance(module, nn.MultiheadAttention) and layer.way == "heads":
        layers.by_heads(module, comm, along.size)
    elif isinstance(module, nn.Embedding):
        layers.vocabulary(module, comm, along.rank * (module.num_embeddings // along.size))
    elif layer.way == "rowwise":
        layers.rowwise(module, comm)
    else:
        layers.colwise(module, comm, layer.parts, along.size)
