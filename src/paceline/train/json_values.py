"""Saves the state of optimizers and schedulers that is not tensors, as JSON in a checkpoint."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import UsageError


def as_json(value: Any, of: str = "scheduler or optimizer") -> Any:
    """Convert numbers, strings, lists and dicts to JSON. `from_json` converts them back."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, (list, tuple)):
        return [as_json(part, of) for part in value]
    if isinstance(value, Mapping):
        return {"table": [[as_json(key, of), as_json(part, of)] for key, part in value.items()]}
    # only pickle could save it, and loading a pickle can execute code
    raise UsageError(code="state-not-plain", kind=type(value).__name__, owner=of)


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(part) for part in value]
    if isinstance(value, dict) and "float" in value:
        return float.fromhex(value["float"])
    if isinstance(value, dict):
        return {from_json(key): from_json(part) for key, part in value["table"]}
    return value


def restore_type(current: Any, saved: Any) -> Any:
    """Convert `saved` to the type of the current value: a tuple, a Counter or a tensor (which is filled in place)."""
    if isinstance(current, Tensor):
        return current.fill_(saved)
    cls: Any = type(current)
    return cls(saved) if isinstance(current, (tuple, Mapping)) and saved is not None else saved


def param_group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def hyperparameters_json(optimizer: Optimizer, scheduler: Any) -> dict[str, Any]:
    state = None if scheduler is None else scheduler.state_dict()
    return {"groups": as_json(param_group_settings(optimizer)), "scheduler": as_json(state)}


def load_hyperparameters_json(optimizer: Optimizer, scheduler: Any, numbers: Mapping[str, Any]) -> None:
    for group, saved in zip(optimizer.param_groups, from_json(numbers["groups"]), strict=True):
        for name, value in saved.items():
            group[name] = restore_type(group.get(name), value)
    if scheduler is not None:
        current, saved = scheduler.state_dict(), from_json(numbers["scheduler"]) or {}
        scheduler.load_state_dict({name: restore_type(current.get(name), value) for name, value in saved.items()})
