"""The user's hooks on parameters: taken off during a backward, and run on the summed gradient of the global batch.

A hook that is not linear (it clips, say) gives another result for each rank's share than for the whole gradient, which
it sees in a plain loop.
"""

import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.modules.module as GLOBAL
from torch import Tensor, nn


class Received(deque[torch.Tensor]):
    """The parameter that has got a gradient last. Its `append` is a hook that runs no Python code."""

    def __init__(self) -> None:
        super().__init__(maxlen=1)


Hooks = dict[int, Callable[..., Any]]
HiddenHooks = list[tuple[nn.Parameter, Hooks, Hooks]]
"""of each parameter that has any: hooks on its gradient, and hooks after the gradient was added to `.grad`"""


def count_hooks(parameters: Iterable[nn.Parameter]) -> int:
    """How many hooks they have, whoever has put them there."""
    count = 0
    for parameter in parameters:
        if before := parameter._backward_hooks:  # pyright: ignore[reportPrivateUsage]
            count += len(before)
        if after := parameter._post_accumulate_grad_hooks:  # pyright: ignore
            count += len(after)
    return count


def hide_hooks(parameters: Iterable[nn.Parameter]) -> HiddenHooks:
    """Take the user's hooks off `parameters`."""
    hidden: HiddenHooks = []
    for parameter in parameters:
        before: Any = parameter._backward_hooks  # pyright: ignore[reportPrivateUsage]
        after: Any = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        if not before and not after:
            continue
        found = _taken(before), _taken(after)
        if any(found):
            hidden.append((parameter, *found))
    return hidden


def show_hooks(hidden: HiddenHooks) -> None:
    """Put them back."""
    for parameter, before, after in hidden:
        if before:
            parameter._backward_hooks.update(before)  # pyright: ignore
        if after:
            parameter._post_accumulate_grad_hooks.update(after)  # pyright: ignore


def _taken(hooks: Any) -> Hooks:
    theirs = {number: hook for number, hook in (hooks or {}).items() if not _is_ours(hook)}
    for number in theirs:
        del hooks[number]
    return theirs


def _is_ours(hook: Any) -> bool:
    """Whether a hook is paceline's or torch's own: those of a reducer, of FSDP, and of what counts for nothing."""
    module = getattr(hook, "__module__", None) or type(getattr(hook, "__self__", None)).__module__
    return hook in (torch.zeros_like, torch.clone) or module.startswith(("paceline.", "torch.distributed."))


def own_hooks(models: Iterable[nn.Module]) -> str:
    """A backward hook of the user's own code on a module, in words; empty if there is none.

    Hooks of installed packages are taken to be linear.
    """
    everywhere = [*GLOBAL._global_backward_hooks.values(), *GLOBAL._global_backward_pre_hooks.values()]  # pyright: ignore
    if any(_is_own(getattr(hook, "__module__", "")) for hook in everywhere):
        return "a backward hook of all modules"
    for model in models:
        for name, module in model.named_modules():
            hooks = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]  # pyright: ignore
            if any(_is_own(getattr(hook, "__module__", "")) for hook in hooks):
                return f"a backward hook of module {name or type(module).__name__}"
    return ""


def own_functions(loss: Tensor) -> str:
    """An autograd function of the user's own code in the graph of `loss`, in words; empty if there is none."""
    for node in _nodes(loss):
        function = getattr(node, "_forward_cls", None)
        if function is not None and _is_own(function.__module__):
            return f"the autograd function {function.__name__}"
    return ""


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The tensors that a backward of `loss` accumulates gradients for."""
    return (node.variable for node in _nodes(loss) if hasattr(node, "variable"))


def _nodes(loss: Tensor) -> Iterator[Any]:
    """The nodes of its graph."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def _is_own(module: str) -> bool:
    """Whether a module is the user's: of no installed package, and not paceline."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or module.partition(".")[0] == "paceline":
        return module == "__main__"
    paths = sysconfig.get_paths()
    return not str(Path(path).resolve()).startswith(tuple(paths[name] for name in ("stdlib", "purelib", "platlib")))
