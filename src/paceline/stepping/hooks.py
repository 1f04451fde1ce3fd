"""The user's hooks on parameters: taken off during a backward, and run on the summed gradient of the global batch.

A hook that is not linear (it clips, say) gives another result for each rank's share than for the whole gradient, which
it sees in a plain loop.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Hooks = dict[int, Callable[..., Any]]
HiddenHooks = list[tuple[nn.Parameter, Hooks, Hooks]]
"""of each parameter that has any: hooks on its gradient, and hooks after the gradient was added to `.grad`"""


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
