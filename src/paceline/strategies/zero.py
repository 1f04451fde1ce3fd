"""The bits of `exact`, with an N-th of the optimizer's memory on each of N ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from paceline.checkpoint.state import Held, Source
from paceline.errors import UsageError
from paceline.scratch.replicate import broadcast_module
from paceline.scratch.tree import TreeReducer
from paceline.scratch.zero import Piece, Shards
from paceline.strategies.base import (
    MakeOptimizer,
    Replica,
    forest,
    leaf_of,
    refuse_foreign,
    refuse_synchronised,
    replica,
)
from paceline.strategies.held import ITEM, named_state, on_device, saved_keys
from paceline.world import World

# Each updates an element by that element's own gradient and history alone.
ELEMENT_WISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.RMSprop,
    optim.Rprop, optim.ASGD,
)  # fmt: skip


def zero(
    model: nn.Module, make_optimizer: MakeOptimizer, world: World, /, *, virtual_ranks: int | None = None
) -> Replica:
    """Gradients as in `exact`; each rank updates its share of the parameters, and keeps the state of that share only.

    Raises:
        ValueError: if the ranks' models differ in names, shapes or types.
        UsageError: for synchronised batch norm, and for an optimizer that looks at more than one element at a time.
    """
    refuse_synchronised(model, "zero")
    broadcast_module(model)
    optimizer = make_optimizer(model.parameters())
    _refuse_whole(optimizer)
    refuse_foreign(model, optimizer)
    shards = Shards(model, world.rank, world.size)
    shards.shard(optimizer)
    reducer = TreeReducer(model, forest(world, virtual_ranks))
    pieces = {name: shards.pieces[p] for name, p in model.named_parameters() if p in shards.pieces}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def hold() -> list[Held]:
        return [held for name, piece in pieces.items() for held in _hold(name, piece, shapes[name], optimizer)]

    def load(source: Source) -> None:
        optimizer.state.clear()
        for name, piece in pieces.items():
            state = _saved(source, name, piece, shapes[name])
            if state:
                optimizer.state[piece.parameter] = on_device(optimizer, piece.parameter, state)

    return replica(
        model,
        optimizer,
        world,
        virtual_ranks=virtual_ranks,
        sync_gradients=reducer.finish,
        backward=leaf_of(reducer),
        hold=hold,
        load=load,
    )


def _refuse_whole(optimizer: Optimizer) -> None:
    if type(optimizer) not in ELEMENT_WISE:
        known = ", ".join(kind.__name__ for kind in ELEMENT_WISE)
        raise UsageError(
            f"strategy 'zero' cuts parameters into pieces, and {type(optimizer).__name__} may look at a whole one. "
            f"Known to update each element by itself: {known}. Use one of these, or strategy exact."
        )


def _hold(name: str, piece: Piece, shape: torch.Size, optimizer: Optimizer) -> list[Held]:
    held: list[Held] = []
    for full, tensor in named_state(name, optimizer.state.get(piece.parameter, {})):
        if tensor.shape == piece.parameter.shape:
            held.append(Held(full, tensor, shape, piece.start, replicated=False))
        elif piece.start == 0:  # a counter: one of those who have it saves it
            held.append(Held(full, tensor, replicated=False))
    return held


def _saved(source: Source, name: str, piece: Piece, shape: torch.Size) -> dict[str, Any]:
    """The state of this piece; of a counter, the whole."""
    state: dict[str, Any] = {}
    for key, full in saved_keys(source, name):
        if key.endswith(ITEM) or key == "step" or source.shape(full) != shape:
            value = source.tensor(full)
            assert value is not None
            state[key.removesuffix(ITEM)] = value.item() if key.endswith(ITEM) else value
        else:
            state[key] = source.tensor(full, piece.start, piece.stop)
    return state
