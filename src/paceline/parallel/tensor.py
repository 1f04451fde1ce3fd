"""Tensor parallelism: each rank keeps and computes its shard of the layers in the plan."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from paceline.checkpoint.shards import ParameterShard
from paceline.collectives.control import raise_on_all_ranks
from paceline.collectives.replicate import broadcast_module
from paceline.compute.forward import wrap_forward
from paceline.errors import UsageError, first_few
from paceline.parallel import layers
from paceline.parallel.dtensor import GatheredInputCache, LayerCommunication, full_tensor
from paceline.parallel.dtensor_mode import DTensorMode
from paceline.parallel.logits import sharded_or_full_logits
from paceline.parallel.tensor_plan import LayerSharding, find_tensor_parallel_plan, shards_by_name
from paceline.rank.world import World

MEGA = 1e6
LOSS_TOLERANCE = 1e-2  # in bf16 a different order of a sum can change the loss this much


@dataclass
class ModelSharding:
    plan: Mapping[str, LayerSharding]
    shards: Mapping[str, ParameterShard]
    ranks: int
    used_elsewhere: list[str] = field(default_factory=list[str])
    """sharded parameters that code outside their layers has used in a forward"""
    sent: dict[str, int] = field(default_factory=dict[str, int])
    """by layer, the bytes that its forwards and backwards have all-reduced so far"""

    def add_sent_bytes(self, layer: str, size: int) -> None:
        self.sent[layer] = self.sent.get(layer, 0) + size

    def format_table(self, model: nn.Module, samples: int, of_step: int) -> list[str]:
        """A table of the sharded layers and the bytes per step. `samples`: in `sent`; `of_step`: in a step."""
        rows = [("parameters", "shape", "sharding", "bytes per step")]
        layers_of: dict[tuple[str, str, str], list[str]] = {}
        for name, layer in self.plan.items():
            of_layer = {id(p) for p in model.get_submodule(name).parameters()}  # a tied one has a different name
            weight = next(n for n in self.shards if n.startswith(f"{name}.") or id(model.get_parameter(n)) in of_layer)
            shard = self.shards[weight]
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            key = (pattern, str(tuple(shard.full_shape)), f"{layer.style}, {tuple(shard.shape)} each")
            layers_of.setdefault(key, []).append(name)
        for (pattern, shape, sharding), names in layers_of.items():
            suffix = f" ({len(names)} layers)" if len(names) > 1 else ""
            size = sum(self.sent.get(name, 0) * of_step // max(1, samples) for name in names)
            rows.append((pattern + suffix, shape, sharding, f"{size / MEGA:.3g} MB"))
        widest = [max(len(row[column]) for row in rows) for column in range(3)]
        padded = [[cell.ljust(w) for cell, w in zip(row, (*widest, 0), strict=True)] for row in rows]
        lines = ["  " + "  ".join(row).rstrip() for row in padded]
        return [f"sharded over {self.ranks} ranks along tensor:", *lines, self._memory(model)]

    def _memory(self, model: nn.Module) -> str:
        whole_by_class: dict[str, int] = {}
        rank_bytes = total_bytes = 0
        for name, parameter in model.named_parameters():
            shard = self.shards.get(name)
            rank_bytes += parameter.nbytes
            total_bytes += parameter.nbytes if shard is None else shard.full_shape.numel() * parameter.element_size()
            if shard is None:
                class_name = type(model.get_submodule(name.rpartition(".")[0])).__name__
                whole_by_class[class_name] = whole_by_class.get(class_name, 0) + parameter.nbytes
        largest_first = sorted(whole_by_class.items(), key=lambda item: -item[1])
        shown = [f"{class_name} ({size / MEGA:.3g} MB)" for class_name, size in largest_first]
        rest = f"; not sharded: {first_few(shown, 6)}" if shown else ""
        return f"  each rank holds {rank_bytes / MEGA:.3g} of {total_bytes / MEGA:.3g} MB of weights{rest}"


def apply_tensor_parallel(
    model: nn.Module, world: World, choose_styles: Callable[[nn.Module], Mapping[str, str]] | None = None,
    probe: Callable[[], float] | None = None, *, sequence: bool = False,
) -> ModelSharding:  # fmt: skip
    """Shard `model`, in place, over the ranks along `tensor` (a collective of all ranks).

    Parameters keep their identity, so an existing optimizer remains valid. `choose_styles`: see `Task.parallelize`.
    `probe`: returns the loss of the model on a few samples, equal on all ranks; called before and after. `sequence`:
    sequence parallelism, between two layers each rank has a part of every sequence.
    """
    along = world.along("tensor")
    assert along.group is not None
    broadcast_module(model)  # shards of differently initialised models would not form one model
    with raise_on_all_ranks(world):
        expected = None if probe is None else probe()
        styles = None if choose_styles is None else dict(choose_styles(model))
        plan = find_tensor_parallel_plan(model, along.size, styles)
        shards = shards_by_name(model, plan, along)
    mesh = DeviceMesh.from_group(along.group, world.device.type)
    sharding = ModelSharding(plan, shards, along.size)
    names = {id(p): name for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, shard in shards.items():
            parameter = model.get_parameter(name)
            parameter.data = shard.extract_shard(parameter.data)
    cache = GatheredInputCache()
    for name, layer in plan.items():
        comm = LayerCommunication(mesh, partial(sharding.add_sent_bytes, name), cache, sequence=sequence)
        _shard_forward(model.get_submodule(name), layer, comm, along)
    mode = DTensorMode(mesh, shards, model)

    def after() -> None:
        cache.clear()
        sharding.used_elsewhere[:] = sorted(names[parameter] for parameter in mode.used_elsewhere)

    run_forwards_in_mode(model, mode, after)
    if probe is not None and expected is not None:
        advice = "Select in Task(parallelize=...) how layers are sharded, or set them to 'whole'"
        check_same_loss(probe, expected, world, advice)
    return sharding


def run_forwards_in_mode(model: nn.Module, mode: DTensorMode, after: Callable[[], object] = lambda: None) -> None:
    """Let the model's forwards run in `mode`; `after` is called after each."""

    def forward(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with mode:
                outputs = inner(*args, **kwargs)
        finally:
            after()
        # an evaluation reads the outputs of one of these ranks, and a gather needs all of them
        return tree_map(sharded_or_full_logits if torch.is_grad_enabled() else full_tensor, outputs)

    wrap_forward(model, forward)


def check_same_loss(probe: Callable[[], float], expected: float, world: World, advice: str) -> None:
    loss, error = math.nan, None
    try:
        loss = probe()
    except (NotImplementedError, RuntimeError) as caught:  # the class depends on the operation
        error = caught
    with raise_on_all_ranks(world):  # also if only some of the ranks have an error
        if error is not None:
            first = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(code="mesh-operation", reason=first, advice=advice) from error
        if not math.isclose(loss, expected, rel_tol=LOSS_TOLERANCE, abs_tol=LOSS_TOLERANCE):
            raise UsageError(code="mesh-loss-differs", loss=loss, expected=expected, advice=advice)


def _shard_forward(module: nn.Module, layer: LayerSharding, comm: LayerCommunication, along: World) -> None:
    if isinstance(module, nn.MultiheadAttention) and layer.style == "heads":
        layers.shard_attention_heads(module, comm, along.size)
    elif isinstance(module, nn.Embedding):
        layers.shard_vocabulary(module, comm, along.rank * (module.num_embeddings // along.size))
    elif layer.style == "rowwise":
        layers.shard_rowwise(module, comm)
    else:
        layers.shard_colwise(module, comm, layer.parts, along.size)
