"""Wraps the forward of modules, and recomputes activations in backward to save memory.

Activation checkpointing: the modules that a rule like `blocks.*,Attention` selects do not keep activations. Backward
computes them again, to the same bits. This needs the same random numbers (of torch, `random` and numpy) and the same
buffers. For example, batch norm must not count a batch twice, and code that reads a buffer must read the same values as
in the first forward.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule  # pyright: ignore[reportPrivateImportUsage]
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError, first_few
from paceline.seeding import GeneratorStates, preserve_generator_states

MAX_SHOWN = 20
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # have no forward
MAX_COPIED_BUFFER_BYTES = 1 << 20  # larger buffers (masks, tables) are rarely written, and only checked

ForwardWrapper = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(the module's original forward, args, kwargs) -> the new outputs"""
Buffers = list[tuple[nn.Module, str, Tensor]]
_is_recording_disabled = ContextVar("is_plain", default=False)


def find_matching_modules(model: nn.Module, rule: str, *, flag: str) -> dict[str, nn.Module]:
    """The modules inside `model` whose name or class matches one of the comma-separated patterns, by name.

    If a module and a module inside it match, only the outer one is returned. * and ? also match dots. `flag` is the
    option of the rule, for the error.
    """
    modules = {name: module for name, module in model.named_modules() if name and not isinstance(module, CONTAINERS)}
    chosen: set[str] = set()
    for pattern in (p.strip() for p in rule.split(",")):
        matches = {
            name for name, module in modules.items()
            if fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)
        }  # fmt: skip
        if not matches:
            names = [f"{name} ({type(module).__name__})" for name, module in modules.items()]
            shown = first_few(names, MAX_SHOWN) or "none but the model itself"
            raise UsageError(code="no-such-module", setting=flag, rule=rule, pattern=pattern, shown=shown)
        chosen |= matches
    outer = [name for name in modules if name in chosen and not any(name.startswith(f"{other}.") for other in chosen)]
    return {name: modules[name] for name in outer}


def wrap_forward(module: nn.Module, around: ForwardWrapper) -> None:
    """Replace the forward of `module` by `around(original forward, args, kwargs)`.

    The module gets a subclass of its class, as with torch's fully_shard. So names, hooks, state and the copies of
    nn.DataParallel do not change. A wrapper module, or a forward set on the instance, would change them.
    """
    cls = type(module)
    if isinstance(module, ScriptModule) or "forward" in vars(module):
        raise UsageError(code="forward-cannot-change", kind=cls.__name__)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(partial(cls.forward, self), args, kwargs)

    forward.__dict__["__wrapped__"] = cls.forward  # so that the signature does not change
    assign_dynamic_subclass(module, forward=forward)


def assign_dynamic_subclass(module: nn.Module, **members: Any) -> None:
    """Give `module` a subclass of its class with the same name and these `members`."""
    cls: Any = type(module)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    module.__class__ = type(cls)(cls.__name__, (cls,), {**names, **members})


@contextmanager
def no_cuda_graphs() -> Generator[None]:
    """Inside, no CUDA graph is recorded or replayed, because the result of the forward may be unused."""
    before = _is_recording_disabled.set(True)
    try:
        yield
    finally:
        _is_recording_disabled.reset(before)


def may_record_cuda_graph() -> bool:
    return not _is_recording_disabled.get()


def checkpoint_activations(model: nn.Module, rule: str) -> list[str]:
    """Checkpoint activations: the selected modules keep only their inputs, and backward computes the rest again.

    Call it before a strategy is applied. It changes the model in place. Names, state and the bits of all results do not
    change.

    Args:
        model: the model. Hugging Face models do not use their cache of keys and values in training.
        rule: comma-separated patterns of names or classes of modules, e.g. "blocks.*,Attention". If a module and a
            module inside it match, only the outer one is selected.

    Returns:
        The names of the selected modules.

    Raises:
        UsageError: a pattern matches no module, or the forward of a selected module cannot be replaced.
    """
    modules = find_matching_modules(model, rule, flag="checkpoint_activations")
    for module in model.modules():
        # a model of Hugging Face
        if hasattr(module, "get_input_embeddings") and "use_cache" in signature(module.forward).parameters:
            module.register_forward_pre_hook(_without_cache, with_kwargs=True)
    for name, module in modules.items():
        wrap_forward(module, partial(_checkpointed, module, name))
    return [*modules]


def _without_cache(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: disable the cache of keys and values, which the second forward would fill again."""
    return (args, {**kwargs, "use_cache": False}) if torch.is_grad_enabled() else None


def _checkpointed(module: nn.Module, name: str, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    count, names = len(args), [*kwargs]  # `run` lives until backward, and must not keep the tensors themselves

    def run(*inputs: Any) -> Any:
        return forward(*inputs[:count], **dict(zip(names, inputs[count:], strict=True)))

    # all arguments by position: torch searches them for the devices whose random streams it must preserve
    return checkpoint(
        run, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=True,
        context_fn=partial(_contexts, module, name),
    )  # fmt: skip


def _contexts(module: nn.Module, name: str) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    buffers: Buffers = [(m, n, b) for m in module.modules() for n, b in m.named_buffers(recurse=False)]
    small = [(m, n, b.clone()) for m, n, b in buffers if b.nbytes <= MAX_COPIED_BUFFER_BYTES]
    large = [(m, n, b) for m, n, b in buffers if b.nbytes > MAX_COPIED_BUFFER_BYTES]
    return _checking(name, large), _restore_for_recomputation(small, GeneratorStates().restore)


@contextmanager
def _checking(name: str, large: Buffers) -> Generator[None]:
    versions = [buffer._version for _, _, buffer in large]  # pyright: ignore[reportPrivateUsage]
    yield
    for (owner, leaf, buffer), version in zip(large, versions, strict=True):
        if getattr(owner, leaf) is not buffer or buffer._version != version:  # pyright: ignore[reportPrivateUsage]
            raise UsageError(code="recompute-large-buffer", name=name, leaf=leaf, mib=buffer.nbytes >> 20)


@contextmanager
def _restore_for_recomputation(before: Buffers, restore_streams: Callable[[], None]) -> Generator[None]:
    """Inside, buffers and random streams are those before the first forward."""
    current = [(owner, leaf, getattr(owner, leaf)) for owner, leaf, _ in before]
    with preserve_generator_states():
        restore_streams()
        for owner, leaf, buffer in before:
            setattr(owner, leaf, buffer.clone())
        try:
            yield
        finally:  # torch may stop early, by an exception
            for owner, leaf, buffer in current:
                setattr(owner, leaf, buffer)
