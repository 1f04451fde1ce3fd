"""What an optimizer keeps for each parameter, under the parameter's name in the model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.state import PrefixedSource, Source, TensorShard, load_into
from paceline.collectives.shards import Piece
from paceline.errors import UsageError

ITEM = ".item"  # ends the name of a plain number


def hold_optimizer(model: nn.Module, optimizer: Optimizer) -> list[TensorShard]:
    """Its whole state; None values are left out, as an optimizer makes them again."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    held: list[TensorShard] = []
    for parameter, state in optimizer.state.items():
        if parameter not in names:
            raise UsageError(code="foreign-parameter-state", shape=tuple(parameter.shape))
        held += [TensorShard(name, tensor) for name, tensor in named_state(names[parameter], state)]
    return held


def named_state(name: str, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that an optimizer keeps for parameter `name`, plain numbers as tensors of one element.

    Raises:
        UsageError: for anything else, which only pickle could save, and loading a pickle runs what it says.
    """
    for key, value in state.items():
        full = f"optimizer/{name}/{key}"
        if isinstance(value, Tensor):
            yield full, value.detach()
        elif isinstance(value, (bool, int, float)):
            yield full + ITEM, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        elif value is not None:
            raise UsageError(code="optimizer-keeps-object", kind=type(value).__name__, key=key, name=name)


def load_optimizer(model: nn.Module, optimizer: Optimizer, source: Source) -> None:
    """Take over its whole state; a parameter without any has not been trained yet."""
    optimizer.state.clear()
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in trained}
    load_states(named, optimizer, {name: saved_state(source, name) for name in named})


def load_states(named: Mapping[str, nn.Parameter], optimizer: Optimizer, states: Mapping[str, dict[str, Any]]) -> None:
    """Give it the `states` of some of its parameters; an empty one is none."""
    for name, parameter in named.items():
        if state := states[name]:
            optimizer.state[parameter] = _on_device(optimizer, parameter, state)


def saved_keys(source: Source, name: str) -> Iterator[tuple[str, str]]:
    """(key, full name) of all that was saved for parameter `name`."""
    prefix = f"optimizer/{name}/"
    for full in source.names(prefix):
        key = full.removeprefix(prefix)
        if "/" not in key:  # else of a parameter called name/...
            yield key, full


def hold_pieces(
    pieces: Mapping[str, Piece], optimizer: Optimizer, unsharded: Mapping[str, nn.Parameter] | None = None
) -> list[TensorShard]:
    """As `hold_optimizer`, if it trains pieces of parameters, by the names of the parameters, and `unsharded` ones."""
    held: list[TensorShard] = []
    for name, parameter in (unsharded or {}).items():
        held += [TensorShard(full, tensor) for full, tensor in named_state(name, optimizer.state.get(parameter, {}))]
    for name, piece in pieces.items():
        for full, tensor in named_state(name, optimizer.state.get(piece.parameter, {})):
            if tensor.shape == piece.parameter.shape:
                held.append(TensorShard(full, tensor, piece.whole, piece.start, replicated=False))
            elif piece.start == 0:  # a counter: one of those who have it saves it
                held.append(TensorShard(full, tensor, replicated=False))
    return held


def load_pieces(
    pieces: Mapping[str, Piece],
    optimizer: Optimizer,
    source: Source,
    unsharded: Mapping[str, nn.Parameter] | None = None,
) -> None:
    """As `load_optimizer`, if it trains pieces of parameters and `unsharded` ones."""
    optimizer.state.clear()
    for name, parameter in (unsharded or {}).items():
        if state := saved_state(source, name):
            optimizer.state[parameter] = _on_device(optimizer, parameter, state)
    for name, piece in pieces.items():
        if state := saved_state(source, name, piece):
            optimizer.state[piece.parameter] = _on_device(optimizer, piece.parameter, state)


def saved_state(source: Source, name: str, piece: Piece | None = None) -> dict[str, Any]:
    """What was saved for parameter `name`, by key: all of it, or a piece; of a counter, the whole."""
    state: dict[str, Any] = {}
    for key, full in saved_keys(source, name):
        if piece is None or key.endswith(ITEM) or key == "step" or source.shape(full) != piece.whole:
            value = source.tensor(full)
            assert value is not None
            state[key.removesuffix(ITEM)] = value.item() if key.endswith(ITEM) else value
        else:
            state[key] = source.tensor(full, piece.start, piece.stop)
    return state


def _on_device(optimizer: Optimizer, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """`state` where `parameter` is; counters (step) only if the optimizer is fused or capturable, as torch wants it."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    all_there = group.get("fused") or group.get("capturable")

    def belongs_there(key: str, value: Any) -> bool:
        return isinstance(value, Tensor) and (all_there or (value.shape == parameter.shape and key != "step"))

    there = {key: value.to(parameter.device) if belongs_there(key, value) else value for key, value in state.items()}
    return {key: _laid_like(parameter, value) for key, value in there.items()}


def _laid_like(parameter: nn.Parameter, value: Any) -> Any:
    """`value` with the parameter's strides, if it has its shape: fused optimizers look at memory, not at strides."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or parameter.is_contiguous():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def load_mean(source: Source, parameters: Sequence[TensorShard]) -> int:
    """Fill trainable parameters with the mean over hosts, of a state that hosts have left between two outer steps.

    Returns:
        Of how many hosts the state is; 0: of none that took local steps.
    """
    saved, steps = source.tensor("outer/hosts"), source.tensor("outer/steps")
    if saved is None or steps is None:
        return 0
    hosts = [PrefixedSource(source, f"hosts/{host}/") for host in range(int(saved))]
    for held in parameters if int(steps) else ():
        if held.name in hosts[0].names(held.name):  # else it is frozen
            total = torch.zeros_like(held.tensor, dtype=torch.float64)
            for host in hosts:
                load_into(host, held)
                total += held.tensor
            held.tensor.copy_(total / len(hosts))
    return len(hosts)


def mean_message(saved: int, now: str) -> str:
    """That a state of `saved` hosts is taken over by others."""
    mean = "it goes on from the mean of their parameters"
    return f"the checkpoint is of {saved} hosts that took local steps, {now}: {mean}"
