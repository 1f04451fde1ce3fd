"""Cuts a model along `tensor`: every rank keeps its part of each layer that the plan names, and computes with that."""

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
from paceline.compute.rules import around_forward
from paceline.errors import UsageError, first_few
from paceline.rank.world import World
from paceline.tensor import layers
from paceline.tensor.guess import CutLayer
from paceline.tensor.plan import cuts_of, find_plan
from paceline.tensor.scores import given
from paceline.tensor.transfers import Inputs, Local
from paceline.tensor.view import View, made_whole

MEGA = 1e6
SAME = 1e-2  # of the loss: in bf16 a sum in another order is that far off


@dataclass
class Cutting:
    """A model that has been cut."""

    plan: Mapping[str, CutLayer]
    cuts: Mapping[str, ShardedParameter]
    ranks: int
    used_elsewhere: list[str] = field(default_factory=list[str])
    """cut parameters that code beside their own layers has used in a forward so far"""
    sent: dict[str, int] = field(default_factory=dict[str, int])
    """by layer: bytes that its forwards so far, and their backwards, have handed to all-reduces"""

    def count(self, layer: str, size: int) -> None:
        """Add to `sent`."""
        self.sent[layer] = self.sent.get(layer, 0) + size

    def table(self, model: nn.Module, samples: int, of_step: int) -> list[str]:
        """What is cut how, and what a step of a rank sends, for the user; `sent` is of `samples` samples."""
        rows = [("parameters", "shape", "cut", "bytes a step")]
        named: dict[tuple[str, str, str], list[str]] = {}
        bytes_of: dict[tuple[str, str, str], int] = {}
        for name, layer in self.plan.items():
            own = {id(p) for p in model.get_submodule(name).parameters()}  # one that is tied has another name
            weight = next(n for n in self.cuts if n.startswith(f"{name}.") or id(model.get_parameter(n)) in own)
            cut = self.cuts[weight]
            how = f"{layer.way}, {tuple(cut.shape)} each"
            key = (".".join("*" if word.isdigit() else word for word in name.split(".")), str(tuple(cut.whole)), how)
            named.setdefault(key, []).append(name)
            bytes_of[key] = bytes_of.get(key, 0) + self.sent.get(name, 0) * of_step // max(1, samples)
        for key, names in named.items():
            many = f" ({len(names)} layers)" if len(names) > 1 else ""
            rows.append((key[0] + many, key[1], key[2], f"{bytes_of[key] / MEGA:.3g} MB"))
        widest = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  " + "  ".join(word.ljust(w) for word, w in zip(row, (*widest, 0), strict=True)).rstrip() for row in rows
        ]
        return [f"cut over {self.ranks} ranks along tensor:", *lines, self._whole(model)]

    def _whole(self, model: nn.Module) -> str:
        kinds: dict[str, int] = {}
        here = whole = 0
        for name, parameter in model.named_parameters():
            cut = self.cuts.get(name)
            here += parameter.nbytes
            whole += parameter.nbytes if cut is None else cut.whole.numel() * parameter.element_size()
            if cut is None:
                kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
                kinds[kind] = kinds.get(kind, 0) + parameter.nbytes
        told = [f"{kind} ({size / MEGA:.3g} MB)" for kind, size in sorted(kinds.items(), key=lambda item: -item[1])]
        rest = f"; whole on each of them: {first_few(told, 6)}" if told else ""
        return f"  each rank holds {here / MEGA:.3g} of {whole / MEGA:.3g} MB of weights{rest}"


def cut_along_tensor(
    model: nn.Module,
    world: World,
    asked: Callable[[nn.Module], Mapping[str, str]] | None = None,
    probe: Callable[[], float] | None = None,
    *,
    sequence: bool = False,
) -> Cutting:
    """Give `model`, in place, to the ranks along `tensor`, each its part (a collective of all ranks).

    Every parameter keeps its identity: an optimizer that was made before knows them still.

    Args:
        model: whole, on every rank.
        world: with a dimension of that name.
        asked: see `Task.parallelize`.
        probe: a loss of the model on a few samples, the same on all ranks: asked before and after.
        sequence: between two layers each rank has a part of every sequence.

    Raises:
        ValueError: if the ranks' models differ in names, shapes or types.
        UsageError: see `find_plan`; or the model that is cut cannot give the loss of the whole one. On one rank,
            ToldElsewhere on the others.
    """
    along = world.along("tensor")
    assert along.group is not None
    broadcast_module(model)  # whole: parts of models that were drawn apart would make up none
    with together(world):
        expected = None if probe is None else probe()
        plan = find_plan(model, along.size, None if asked is None else dict(asked(model)))
        cuts = cuts_of(model, plan, along)
    mesh = DeviceMesh.from_group(along.group, world.device.type)
    cutting = Cutting(plan, cuts, along.size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in cuts:
                parameter.data = cuts[name].part(parameter.data)
    inputs = Inputs()
    for name, layer in plan.items():
        local = Local(mesh, partial(cutting.count, name), inputs, sequence=sequence)
        _compute_in_parts(model.get_submodule(name), layer, local, along)
    view = View(mesh, cuts, model)
    names = {id(p): name for name, p in model.named_parameters()}

    def after() -> None:
        inputs.forget()
        cutting.used_elsewhere[:] = sorted(names[one] for one in view.used_elsewhere)

    computed_in(model, view, after)
    if probe is not None and expected is not None:
        compare_losses(probe, expected, world, "Say in Task(parallelize=...) which layers are cut, or stay whole")
    return cutting


def computed_in(model: nn.Module, view: View, after: Callable[[], object] = lambda: None) -> None:
    """Let `view` listen to the model's forwards; `after` is called when one is over."""

    def forward(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with view:
                outputs = inner(*args, **kwargs)
        finally:
            after()
        # an evaluation asks one of these ranks for its numbers, and fetching needs all of them
        return tree_map(given if torch.is_grad_enabled() else made_whole, outputs)

    around_forward(model, forward)


def compare_losses(probe: Callable[[], float], expected: float, world: World, advice: str) -> None:
    """See that a model that ranks share gives the loss of the whole one (a collective).

    Raises:
        UsageError: it does not. On one rank, ToldElsewhere on the others.
    """
    found, error = math.nan, None
    try:
        found = probe()
    except (NotImplementedError, RuntimeError) as caught:  # which of them torch raises depends on the operation
        error = caught
    with together(world):  # also where only some of the ranks have met it
        if error is not None:
            first = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(code="mesh-operation", reason=first, advice=advice) from error
        if not math.isclose(found, expected, rel_tol=SAME, abs_tol=SAME):
            raise UsageError(code="mesh-loss-differs", loss=found, expected=expected, advice=advice)


def _compute_in_parts(module: nn.Module, layer: CutLayer, local: Local, along: World) -> None:
    if isinstance(module, nn.MultiheadAttention) and layer.way == "heads":
        layers.by_heads(module, local, along.size)
    elif isinstance(module, nn.Embedding):
        layers.vocabulary(module, local, along.rank * (module.num_embeddings // along.size))
    elif layer.way == "rowwise":
        layers.rowwise(module, local)
    else:
        layers.colwise(module, local, layer.parts, along.size)
