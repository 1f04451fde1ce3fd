"""The user's hooks on parameters. They are removed during a backward, and run on the gradient of the global batch.

A hook that is not linear, for example one that clips, must see the gradient of the global batch, as in a plain loop.
Applied to the gradient of each rank, it gives a different result.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial, wraps
from operator import attrgetter
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.modules.module as GLOBAL
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import CheckpointFunction

from paceline.rank.sites import USER, code_owner


class LastGradParameter(deque[torch.Tensor]):
    """The last parameter that received a gradient. Its `append` is a hook that runs no Python code."""

    def __init__(self) -> None:
        super().__init__(maxlen=1)


Hooks = dict[int, Callable[..., Any]]
HiddenHooks = list[tuple[nn.Parameter, Hooks, Hooks]]
"""for each parameter with hooks: the hooks on its gradient, and the hooks after the gradient was added to `.grad`"""


_hooks_before, _hooks_after = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


def count_hooks(parameters: Sequence[nn.Parameter]) -> int:
    """The number of their hooks, of the user, torch and paceline."""
    before, after = map(_hooks_before, parameters), map(_hooks_after, parameters)
    return sum(map(len, filter(None, before))) + sum(map(len, filter(None, after)))


def hide_hooks(parameters: Iterable[nn.Parameter]) -> HiddenHooks:
    hidden: HiddenHooks = []
    for parameter in parameters:
        before: Any = parameter._backward_hooks  # pyright: ignore[reportPrivateUsage]
        after: Any = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        if not before and not after:
            continue
        user_hooks = _taken(before), _taken(after)
        if any(user_hooks):
            hidden.append((parameter, *user_hooks))
    return hidden


def restore_hooks(hidden: HiddenHooks) -> None:
    for parameter, before, after in hidden:
        if before:
            parameter._backward_hooks.update(before)  # pyright: ignore
        if after:
            parameter._post_accumulate_grad_hooks.update(after)  # pyright: ignore


def _taken(hooks: Any) -> Hooks:
    user_hooks = {
        number: hook for number, hook in (hooks or {}).items() if not (_is_framework_hook(hook) or _is_joint(hook))
    }
    for number in user_hooks:
        del hooks[number]
    return user_hooks


def has_multi_grad_hook(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any has a hook of torch's `register_multi_grad_hook`, which can only run inside a backward."""
    return any(_is_joint(hook) for p in parameters for hook in (p._backward_hooks or {}).values())  # pyright: ignore


def _is_joint(hook: Any) -> bool:
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename == register_multi_grad_hook.__code__.co_filename


def _is_framework_hook(hook: Any) -> bool:
    """Whether a hook belongs to paceline or torch: those of a reducer, of FSDP, and of dummy batches."""
    module = getattr(hook, "__module__", None) or type(getattr(hook, "__self__", None)).__module__
    return hook in (torch.zeros_like, torch.clone) or module.startswith(("paceline.", "torch.distributed."))


def describe_user_backward_hook(models: Iterable[nn.Module]) -> str:
    """A description of a backward hook of the user on a module; empty if there is none.

    Hooks of installed packages count as linear.
    """
    everywhere = [*GLOBAL._global_backward_hooks.values(), *GLOBAL._global_backward_pre_hooks.values()]  # pyright: ignore
    if any(map(_is_user_hook, everywhere)):
        return "a backward hook of all modules"
    for model in models:
        for name, module in model.named_modules():
            hooks = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]  # pyright: ignore
            if any(map(_is_user_hook, hooks)):
                return f"a backward hook of module {name or type(module).__name__}"
    return ""


def describe_user_autograd_function(loss: Tensor) -> str:
    """A description of an autograd function of the user in the graph of `loss`; empty if there is none.

    The graph inside a reentrant checkpoint is not known. With such a checkpoint, any such function of the process
    counts.
    """
    classes = {cls for cls in _kinds_of(torch.autograd.Function) if _is_user_module(cls.__module__)}
    if not classes:
        return ""
    for node in graph_nodes(loss.grad_fn):
        function = getattr(node, "_forward_cls", None)
        if function in classes:
            return f"the autograd function {function.__name__}"
        if function is CheckpointFunction:
            return f"a checkpoint with use_reentrant=True, perhaps with the autograd function {classes.pop().__name__},"
    return ""


def _kinds_of(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _kinds_of(subclass)


class TensorHookTracker:
    """Counts hooks on leaves, and records the user's hooks that change gradients of other tensors.

    Autograd does not list the hooks of a tensor, so this class replaces methods of `Tensor` until `remove`.
    """

    _METHODS = ("register_hook", "register_post_accumulate_grad_hook")

    def __init__(self) -> None:
        self.changed = ""
        """a description of the last hook that changed the gradient of a tensor other than a leaf"""
        self.on_leaves = 0
        """number of hooks that were registered on leaves"""
        register: Any = Tensor.register_hook
        register_after: Any = Tensor.register_post_accumulate_grad_hook

        def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
            self.on_leaves += tensor.is_leaf
            is_own = not tensor.is_leaf and _is_user_hook(hook)
            return register(tensor, partial(self._note, hook) if is_own else hook)

        def register_hook_after(tensor: Tensor, hook: Callable[[Tensor], None]) -> Any:
            self.on_leaves += 1
            return register_after(tensor, hook)

        self._before = [register, register_after]
        self._ours: list[Any] = [wraps(register)(register_hook), wraps(register_after)(register_hook_after)]
        self._replace(self._before, self._ours)

    def _note(self, hook: Callable[[Tensor], Tensor | None], gradient: Tensor) -> Tensor | None:
        version = gradient._version  # pyright: ignore[reportPrivateUsage]
        new_gradient = hook(gradient)
        if new_gradient is not None or gradient._version != version:  # pyright: ignore[reportPrivateUsage]
            self.changed = f"the hook {getattr(hook, '__name__', type(hook).__name__)} of a tensor"
        return new_gradient

    def remove(self) -> None:
        """Restore the methods of `Tensor`, unless other code has replaced them since."""
        self._replace(self._ours, self._before)

    def _replace(self, those: Sequence[Any], by: Sequence[Any]) -> None:
        for name, before, after in zip(self._METHODS, those, by, strict=True):
            if getattr(Tensor, name) is before:
                setattr(Tensor, name, after)


def graph_nodes(root: Any) -> Iterator[Any]:
    visited: set[Any] = set()
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def _is_user_hook(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    # an operation of torch or Python: no package registers one
    return isinstance(hook, BuiltinFunctionType) or _is_user_module(getattr(hook, "__module__", None) or "")


@cache  # a step asks for each autograd function of the process
def _is_user_module(module: str) -> bool:
    """Whether a module belongs to the user: not to an installed package, and not to paceline."""
    if module.partition(".")[0] in ("paceline", "torch"):
        return False
    path = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or path is None or code_owner(path) is USER
