"""The optimizers of a model: several as one, and their state as tensors with the parameters' names in the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from paceline.checkpoint.state import PrefixedSource, StateSource, TensorShard, load_shard
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.collectives.owners import LocalShard

NUMBER_SUFFIX = ".item"  # suffix of the name of a plain number


class OptimizerSequence(Optimizer):
    """Optimizers of different parameters of one model. It steps them in order; each keeps its state and its hooks."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        # Without Optimizer.__init__: `step` would run the hooks for steps of any optimizer a second time.
        self.optimizers, self.defaults = [*optimizers], {}
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        trained = [id(parameter) for group in self.param_groups for parameter in group["params"]]
        if len({*trained}) < len(trained):
            raise UsageError(code="parameters-trained-twice")

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizers[0].register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizers[-1].register_step_post_hook(hook)


def each_optimizer(optimizer: Optimizer) -> Sequence[Optimizer]:
    return optimizer.optimizers if isinstance(optimizer, OptimizerSequence) else [optimizer]


def parameters_by_optimizer(optimizer: Optimizer) -> list[list[nn.Parameter]]:
    return [[p for group in one.param_groups for p in group["params"]] for one in each_optimizer(optimizer)]


def format_optimizer_types(optimizer: Optimizer) -> str:
    return ", ".join(type(opt).__name__ for opt in each_optimizer(optimizer))


def can_skip_step_on_device(optimizer: Optimizer) -> bool:
    """Whether a step of `optimizer` with `found_inf` equal to 1 skips the update, and calls no code of the user."""
    own: Any = optimizer
    if type(optimizer) not in (Adam, AdamW, Adagrad, SGD) or "step" in vars(optimizer):
        return False
    return not (own._optimizer_step_pre_hooks or own._optimizer_step_post_hooks)


def changes_nothing_if_skipped(optimizer: Optimizer) -> bool:
    """Whether such a step changes nothing. The answer is the same on all ranks that have the same gradients.

    A step must not create state that a skipped step would not have. The first step of fused SGD with momentum also
    leaves its buffers uninitialized if it is skipped (torch 2.11 to 2.14).
    """
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.grad is not None]
        if not group["fused"] or any(p.grad.dtype != torch.float32 for p in trained):
            return False
        if type(optimizer) is not SGD:
            has_state = all(map(optimizer.state.__contains__, trained))
        else:
            momenta = (optimizer.state.get(p, {}).get("momentum_buffer") for p in trained)
            has_state = not group["momentum"] or all(momentum is not None for momentum in momenta)
        if not has_state:
            return False
    return True


# ---- the state of an optimizer


def full_optimizer_state(model: nn.Module, optimizer: Optimizer) -> list[TensorShard]:
    """The whole state of `optimizer`. None values are skipped, because the optimizer creates them again."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    shards: list[TensorShard] = []
    for parameter, state in (item for opt in each_optimizer(optimizer) for item in opt.state.items()):
        if parameter not in names:
            raise UsageError(code="foreign-parameter-state", shape=tuple(parameter.shape))
        shards += [TensorShard(name, tensor) for name, tensor in optimizer_state_tensors(names[parameter], state)]
    return shards


def optimizer_state_tensors(name: str, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The optimizer state of parameter `name` as tensors; plain numbers become tensors of one element."""
    for key, value in state.items():
        full = f"optimizer/{name}/{key}"
        if isinstance(value, Tensor):
            yield full, value.detach()
        elif isinstance(value, (bool, int, float)):
            yield full + NUMBER_SUFFIX, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        elif value is not None:  # only pickle could save it, and loading a pickle executes code
            raise UsageError(code="optimizer-keeps-object", kind=type(value).__name__, key=key, name=name)


def load_optimizer(model: nn.Module, optimizer: Optimizer, source: StateSource) -> None:
    """Load the whole state of `optimizer`. A parameter without state has not been trained yet."""
    load_saved_optimizer_state({}, optimizer, source, dict(model.named_parameters()))


def set_parameter_states(
    named: Mapping[str, nn.Parameter], optimizer: Optimizer, states: Mapping[str, dict[str, Any]]
) -> None:
    for name, parameter in named.items():
        if state := states[name]:
            optimizer.state[parameter] = _on_device(optimizer, parameter, state)


def optimizer_shards_of_pieces(
    pieces: Mapping[str, LocalShard], optimizer: Optimizer, unsharded: Mapping[str, nn.Parameter] | None = None
) -> list[TensorShard]:
    """As `full_optimizer_state`, for an optimizer of `pieces` of parameters, by name, and of `unsharded` ones.

    A piece may be a whole parameter that this rank alone updates.
    """
    states = {parameter: state for opt in each_optimizer(optimizer) for parameter, state in opt.state.items()}
    shards: list[TensorShard] = []
    for name, parameter in (unsharded or {}).items():
        tensors = optimizer_state_tensors(name, states.get(parameter, {}))
        shards += [TensorShard(full, tensor) for full, tensor in tensors]
    for name, piece in pieces.items():
        for full, tensor in optimizer_state_tensors(name, states.get(piece.parameter, {})):
            if tensor.shape == piece.parameter.shape and not piece.is_whole:
                shards.append(TensorShard(full, tensor, piece.full_shape, piece.start, replicated=False))
            elif piece.start == 0:  # a counter: one of the ranks that have it saves it
                shards.append(TensorShard(full, tensor, replicated=False))
    return shards


def load_saved_optimizer_state(
    pieces: Mapping[str, LocalShard],
    optimizer: Optimizer,
    source: StateSource,
    unsharded: Mapping[str, nn.Parameter] | None = None,
) -> None:
    named = {**(unsharded or {}), **{name: piece.parameter for name, piece in pieces.items()}}
    for opt in each_optimizer(optimizer):
        opt.state.clear()
        trained = {id(parameter) for group in opt.param_groups for parameter in group["params"]}
        own = {name: parameter for name, parameter in named.items() if id(parameter) in trained}
        states = {name: read_saved_parameter_state(source, name, pieces.get(name)) for name in own}
        set_parameter_states(own, opt, states)


def read_saved_parameter_state(source: StateSource, name: str, piece: LocalShard | None = None) -> dict[str, Any]:
    """The saved state of parameter `name`, by key: whole tensors, or those of a piece. Counters are always whole."""
    state: dict[str, Any] = {}
    prefix = f"optimizer/{name}/"
    for full in source.names(prefix):
        key = full.removeprefix(prefix)
        if "/" in key:  # it belongs to a parameter called name/...
            continue
        if (
            piece is None
            or piece.is_whole
            or key.endswith(NUMBER_SUFFIX)
            or key == "step"
            or source.shape(full) != piece.full_shape
        ):
            value = source.tensor(full)
            assert value is not None
            state[key.removesuffix(NUMBER_SUFFIX)] = value.item() if key.endswith(NUMBER_SUFFIX) else value
        else:
            state[key] = source.tensor(full, piece.start, piece.stop)
    return state


def _on_device(optimizer: Optimizer, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """`state` on the device of `parameter`, with its strides, because fused optimizers ignore strides.

    Counters move only for a fused or capturable optimizer, as in torch.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    moves_counters = group.get("fused") or group.get("capturable")

    def placed(key: str, value: Tensor) -> Tensor:
        if moves_counters or (value.shape == parameter.shape and key != "step"):
            value = value.to(parameter.device)
        if value.shape != parameter.shape or parameter.is_contiguous():
            return value
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)

    return {key: placed(key, value) if isinstance(value, Tensor) else value for key, value in state.items()}


def load_mean_parameters(source: StateSource, parameters: Sequence[TensorShard]) -> int:
    """Load the mean over nodes into trainable parameters, if the state was saved between two outer steps.

    Returns the number of nodes that took local steps in the saved run; 0 if none did.
    """
    saved, steps = source.tensor("outer/hosts"), source.tensor("outer/steps")
    if saved is None or steps is None:
        return 0
    hosts = [PrefixedSource(source, f"hosts/{host}/") for host in range(int(saved))]
    for shard in parameters if int(steps) else ():
        if shard.name in hosts[0].names(shard.name):  # else it is frozen
            total = torch.zeros_like(shard.tensor, dtype=torch.float64)
            for host in hosts:
                load_shard(host, shard)
                total += shard.tensor
            shard.tensor.copy_(total / len(hosts))
    return len(hosts)


def describe_resume_from_mean(saved: int, now: str) -> str:
    mean = "training resumes from the mean of their parameters"
    return f"the checkpoint was saved by {saved} nodes that took local steps, {now}: {mean}"
