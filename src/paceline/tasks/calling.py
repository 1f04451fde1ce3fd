"""How a task's model is called: with its inputs, or by name with those of a dict that its forward takes."""

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any

from torch import nn

NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def call(model: nn.Module, inputs: Any, through: Callable[..., Any] | None = None) -> Any:
    """What `model` gives for `inputs`.

    The values of a dict are given by name where the forward takes names of its keys: only those that it takes, all of
    them with **kwargs. A forward that takes none of them, or needs something else besides, gets the dict as it is.

    Args:
        model: whose forward says what it takes.
        inputs: of a batch.
        through: what is called, if not the model itself: a strategy's wrapper of it.
    """
    called = model if through is None else through
    names = _taken(model, inputs) if isinstance(inputs, Mapping) else []
    return called(**{name: inputs[name] for name in names}) if names else called(inputs)


def _taken(model: nn.Module, inputs: Mapping[Any, Any]) -> list[str]:
    parameters = signature(model.forward).parameters
    keys = [key for key in inputs if isinstance(key, str)]
    named = {name: p for name, p in parameters.items() if p.kind in NAMED}
    if any(p.default is Parameter.empty and name not in keys for name, p in named.items()):
        return []
    takes_all = any(p.kind == Parameter.VAR_KEYWORD for p in parameters.values())
    return [key for key in keys if takes_all or key in named]
