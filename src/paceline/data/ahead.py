"""Batches on the device. On a GPU the next one is already on its way while the current one is computed.

The next batch is asked for, and its copy begun on a stream of its own, before the current one is handed out: a step
ends with a wait for the GPU, and a copy that began after it would be waited for. On the CPU nothing is done ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

Begun = TypeVar("Begun")


def on_its_way(batches: Iterator[Any], device: torch.device) -> Generator[Any]:
    """`batches` on `device`, in order."""
    if device.type != "cuda":
        for batch in batches:
            yield moved(batch, device)
        return
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # data that lie on the GPU are there before they are gathered

    def begin() -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(side):
            batch = moved(next(batches), device)
            arrived = torch.cuda.Event()
            arrived.record(side)
        return batch, arrived

    def end(begun: tuple[Any, torch.cuda.Event]) -> Any:
        batch, arrived = begun
        current = torch.cuda.current_stream(device)
        current.wait_event(arrived)
        _keep_until_used(batch, current)
        return batch

    yield from one_ahead(begin, end)


def one_ahead(begin: Callable[[], Begun], end: Callable[[Begun], Any]) -> Generator[Any]:
    """What `end` makes of each thing that `begin` gives, until it raises StopIteration; the next is begun before."""
    try:
        begun = begin()
        while True:
            try:
                following = begin()
            except StopIteration:
                break
            yield end(begun)
            begun = following
    except StopIteration:
        return
    yield end(begun)


def moved(batch: Any, device: torch.device) -> Any:
    """`batch` with all its tensors on `device`; a tuple without names becomes a list."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return [moved(value, device) for value in batch]
    return batch


def _keep_until_used(batch: Any, stream: torch.cuda.Stream) -> None:
    """Memory of the side stream must not be given to the next copy while the other stream still reads it."""
    if isinstance(batch, Tensor):
        batch.record_stream(stream)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            _keep_until_used(value, stream)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            _keep_until_used(value, stream)
