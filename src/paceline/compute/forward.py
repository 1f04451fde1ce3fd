"""Changes the forward of a model's modules: of those that a rule like `blocks.*,Attention` names; to save memory.

Activation checkpointing: some modules do not keep what backward needs, but compute it again, to the same bits. This
takes the same random numbers (torch's streams, `random`'s and numpy's) and the same buffers: batch norm, for example,
must not count a batch twice, and code that reads a buffer must read what the first forward has read.
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
from paceline.seeding import preserved_streams, remembered_streams

MAX_SHOWN = 20
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # have no forward of their own
COPIED_BYTES = 1 << 20  # larger buffers (masks, tables) are hardly ever written, and only checked

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(the module's own forward, args, kwargs) -> what forward returns now"""
Buffers = list[tuple[nn.Module, str, Tensor]]
_is_plain = ContextVar("is_plain", default=False)


def matching(model: nn.Module, rule: str, *, flag: str) -> dict[str, nn.Module]:
    """The modules inside `model` whose name or class matches one of the comma-separated patterns, by name.

    Of a module and those inside it only the outer one. Patterns are a shell's: * and ? match any characters, dots too.

    Raises:
        UsageError: a pattern matches nothing; lists what there is. `flag` is the option of the rule.
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


def wrap_forward(module: nn.Module, around: Around) -> None:
    """Let `module` compute `around(its own forward, args, kwargs)`; nothing else of it changes.

    Its class becomes a subclass, as torch's fully_shard makes it. So names, hooks, state and nn.DataParallel's copies
    stay what they were; with a wrapper, or a forward bound to one instance, they would not.

    Raises:
        UsageError: for a module whose forward is not its class's.
    """
    kind = type(module)
    if isinstance(module, ScriptModule) or "forward" in vars(module):
        raise UsageError(code="forward-cannot-change", kind=kind.__name__)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(partial(kind.forward, self), args, kwargs)

    forward.__dict__["__wrapped__"] = kind.forward  # so that its signature is the model's
    override_members(module, forward=forward)


def override_members(module: nn.Module, **members: Any) -> None:
    """Give `module` a subclass of its class, of the same name, with `members`."""
    kind: Any = type(module)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind)(kind.__name__, (kind,), {**names, **members})


@contextmanager
def without_recording() -> Generator[None]:
    """Inside, no CUDA graph is recorded or replayed: a later step must not replay a forward whose result is unused."""
    before = _is_plain.set(True)
    try:
        yield
    finally:
        _is_plain.reset(before)


def may_record() -> bool:
    """Whether a model may be recorded or replayed now."""
    return not _is_plain.get()


def recompute(model: nn.Module, rule: str) -> list[str]:
    """Let the modules that `rule` names keep only their inputs, and backward compute the rest again.

    Call it before a strategy is applied; it changes the model in place and returns the names of these modules (see
    `matching`). Names and state stay as they are, and so do the bits of every result.

    Raises:
        UsageError: a pattern matches nothing.
    """
    modules = matching(model, rule, flag="checkpoint_activations")
    for module in model.modules():
        # of Hugging Face
        if hasattr(module, "get_input_embeddings") and "use_cache" in signature(module.forward).parameters:
            module.register_forward_pre_hook(_without_cache, with_kwargs=True)
    for name, module in modules.items():
        wrap_forward(module, partial(_checkpointed, module, name))
    return [*modules]


def _without_cache(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Keys and values that the first forward has put into a cache would be there twice in the second."""
    return (args, {**kwargs, "use_cache": False}) if torch.is_grad_enabled() else None


def _checkpointed(module: nn.Module, name: str, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    count, names = len(args), [*kwargs]  # `run` lives until backward, and must not keep the tensors themselves

    def run(*inputs: Any) -> Any:
        return forward(*inputs[:count], **dict(zip(names, inputs[count:], strict=True)))

    # All arguments by position: torch looks in these for the devices whose random streams it has to keep.
    return checkpoint(
        run, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=True,
        context_fn=partial(_contexts, module, name),
    )  # fmt: skip


def _contexts(module: nn.Module, name: str) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first forward, and around the second."""
    buffers: Buffers = [(m, n, b) for m in module.modules() for n, b in m.named_buffers(recurse=False)]
    small = [(m, n, b.clone()) for m, n, b in buffers if b.nbytes <= COPIED_BYTES]
    large = [(m, n, b) for m, n, b in buffers if b.nbytes > COPIED_BYTES]
    return _checking(name, large), _again(small, remembered_streams())


@contextmanager
def _checking(name: str, large: Buffers) -> Generator[None]:
    versions = [buffer._version for _, _, buffer in large]  # pyright: ignore[reportPrivateUsage]
    yield
    for (owner, leaf, buffer), version in zip(large, versions, strict=True):
        if getattr(owner, leaf) is not buffer or buffer._version != version:  # pyright: ignore[reportPrivateUsage]
            raise UsageError(code="recompute-large-buffer", name=name, leaf=leaf, mib=buffer.nbytes >> 20)


@contextmanager
def _again(before: Buffers, restore_streams: Callable[[], None]) -> Generator[None]:
    """Inside, buffers and streams are those before the first forward; afterwards those of now."""
    now = [(owner, leaf, getattr(owner, leaf)) for owner, leaf, _ in before]
    with preserved_streams():
        restore_streams()
        for owner, leaf, buffer in before:
            setattr(owner, leaf, buffer.clone())
        try:
            yield
        finally:  # also when torch stops early, which it does by an exception
            for owner, leaf, buffer in now:
                setattr(owner, leaf, buffer)
