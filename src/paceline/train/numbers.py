"""The numbers of optimizers and schedulers as JSON: what a checkpoint keeps of them beside tensors."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import UsageError


def as_json(value: Any, of: str = "scheduler or optimizer") -> Any:
    """`value` as JSON that `from_json` turns back: numbers, words, lists and tables of them.

    Raises:
        UsageError: for anything else, which only pickle could save, and loading a pickle runs what it says.
    """
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
    raise UsageError(code="state-not-plain", kind=type(value).__name__, owner=of)


def from_json(value: Any) -> Any:
    """What `as_json` was given; tuples come back as lists."""
    if isinstance(value, list):
        return [from_json(part) for part in value]
    if isinstance(value, dict) and "float" in value:
        return float.fromhex(value["float"])
    if isinstance(value, dict):
        return {from_json(key): from_json(part) for key, part in value["table"]}
    return value


def like(now: Any, saved: Any) -> Any:
    """`saved` as the type that the object at hand has there: a tuple, a Counter, a tensor."""
    if isinstance(now, Tensor):
        return now.fill_(saved)
    kind: Any = type(now)
    return kind(saved) if isinstance(now, (tuple, Mapping)) and saved is not None else saved


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of its groups of parameters: learning rate, weight decay, ..."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def numbers_of(optimizer: Optimizer, scheduler: Any) -> dict[str, Any]:
    """What `load_numbers` takes over: the settings of the optimizer's groups, and the scheduler's state, if any."""
    state = None if scheduler is None else scheduler.state_dict()
    return {"groups": as_json(settings_of(optimizer)), "scheduler": as_json(state)}


def load_numbers(optimizer: Optimizer, scheduler: Any, found: Mapping[str, Any]) -> None:
    """Take over what `numbers_of` gave."""
    for group, saved in zip(optimizer.param_groups, from_json(found["groups"]), strict=True):
        for name, value in saved.items():
            group[name] = like(group.get(name), value)
    if scheduler is not None:
        now, saved = scheduler.state_dict(), from_json(found["scheduler"]) or {}
        scheduler.load_state_dict({name: like(now.get(name), value) for name, value in saved.items()})
