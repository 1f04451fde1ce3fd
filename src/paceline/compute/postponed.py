"""torch's compiler is imported when somebody compiles, and not when somebody makes an optimizer.

Each optimizer asks torch._dynamo to leave it alone (`_disable_dynamo`), and to break the graph in its steps
(`_use_grad_for_differentiable`): an import of 800 modules that takes two thirds as long as torch itself. But what has
not been imported compiles nothing: there is nothing to leave alone, and no graph to break. Until it is imported, by
whomever, optimizers do without; from then on all of torch is as it came. A torch whose functions do other things than
those that are known here keeps its import.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.worker.imports import COMPILER, when_imported

DISABLED = "__dynamo_disable"  # where `_disable_dynamo` keeps what it calls in a function's place
STEP_DOES = {COMPILER, "_dynamo", "graph_break", "cast", "Optimizer", "is_grad_enabled", "set_grad_enabled", "defaults"}


def postpone_compiler() -> None:
    """Spare the optimizers that torch has, and classes made of them by now, the import of its compiler."""
    if COMPILER in sys.modules:
        return
    changes = [change for kind in _kinds(Optimizer) for function in _functions(kind) for change in _changes(function)]
    for do, _ in changes:
        do()

    def put_back(*, late: bool) -> None:
        del late
        for _, undo in changes:
            undo()

    when_imported(COMPILER, put_back)


def _plain(func: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's `_use_grad_for_differentiable`, without the compiler."""

    def step(*args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(args[0].defaults["differentiable"]):
            return func(*args, **kwargs)

    return step


def _inner(function: Any, name: str) -> CodeType | None:
    found = (part for part in function.__code__.co_consts if isinstance(part, CodeType) and part.co_name == name)
    return next(found, None)


PLAIN_STEP = _inner(_plain, "step")
TORCH_STEP = _inner(getattr(sys.modules[Optimizer.__module__], "_use_grad_for_differentiable", _plain), "_use_grad")
TORCH_DISABLED = _inner(getattr(torch, "_disable_dynamo", _plain), "inner")


def _changes(function: Any) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """What to do to `function`, and what undoes it.

    Its code is exchanged, and not the function, because by now it may stand in other places than its class.
    """
    code = function.__code__
    if code is TORCH_STEP and code.co_freevars == ("func",) and {*code.co_names} <= STEP_DOES:
        yield (
            partial(setattr, function, "__code__", PLAIN_STEP),
            partial(setattr, function, "__code__", code),
        )
    elif code is TORCH_DISABLED and DISABLED in code.co_consts:
        kept: dict[str, Any] = vars(function.__wrapped__)
        if DISABLED not in kept:
            yield (
                partial(kept.__setitem__, DISABLED, function.__wrapped__),
                partial(kept.pop, DISABLED, None),
            )


def _kinds(kind: type) -> Iterator[type]:
    yield kind
    for lower in kind.__subclasses__():
        yield from _kinds(lower)


def _functions(kind: type) -> Iterator[Any]:
    """The class's own functions, and those that these are wrapped around."""
    for found in [*vars(kind).values()]:
        while isinstance(found, FunctionType):
            yield found
            found = getattr(found, "__wrapped__", None)
