"""Activation checkpointing: some modules do not keep what backward needs, but compute it again, to the same bits.

This takes the same random numbers (torch's streams, `random`'s and numpy's) and the same buffers: batch norm, say,
must not count a batch twice, and code that reads a buffer must read what the first forward has read.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.compute.rules import around_forward, matching
from paceline.errors import UsageError
from paceline.seeding import preserved_streams, remembered_streams

COPIED_BYTES = 1 << 20  # larger buffers (masks, tables) are hardly ever written, and only checked

Buffers = list[tuple[nn.Module, str, Tensor]]


def recompute(model: nn.Module, rule: str) -> list[str]:
    """Let the modules that `rule` names keep only their inputs, and backward compute the rest again.

    Call it before a strategy is applied; it changes the model in place and returns the names of these modules (see
    `rules.matching`). Names and state stay as they are, and so do the bits of every result.

    Raises:
        UsageError: a pattern matches nothing.
    """
    found = matching(model, rule, flag="checkpoint_activations")
    for module in model.modules():
        # of Hugging Face
        if hasattr(module, "get_input_embeddings") and "use_cache" in signature(module.forward).parameters:
            module.register_forward_pre_hook(_without_cache, with_kwargs=True)
    for name, module in found.items():
        around_forward(module, partial(_forward_once_more, module, name))
    return [*found]


def _without_cache(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Keys and values that the first forward has put into a cache would be there twice in the second."""
    return (args, {**kwargs, "use_cache": False}) if torch.is_grad_enabled() else None


def _forward_once_more(
    module: nn.Module, name: str, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    names = [*kwargs]

    def run(*everything: Any) -> Any:
        own = len(everything) - len(names)
        return forward(*everything[:own], **dict(zip(names, everything[own:], strict=True)))

    # All arguments by position: torch looks in these for the devices whose random streams it has to keep.
    return checkpoint(
        run, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=True,
        context_fn=partial(_contexts, module, name),
    )  # fmt: skip


def _contexts(module: nn.Module, name: str) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    buffers: Buffers = [(m, n, b) for m in module.modules() for n, b in m.named_buffers(recurse=False)]
    small = [(m, n, b.clone()) for m, n, b in buffers if b.nbytes <= COPIED_BYTES]
    large = [(m, n, b) for m, n, b in buffers if b.nbytes > COPIED_BYTES]
    return _watching(name, large), _again(small, remembered_streams())


@contextmanager
def _watching(name: str, large: Buffers) -> Generator[None]:
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
