"""Brings batches onto the device; on a GPU, the next one while the current one is computed.

The next batch is requested, and its copy begun on a stream of its own, before the current one is handed out: a step
ends with a wait for the GPU, and would wait for a copy begun after it. On the CPU nothing is done ahead.
"""

from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import torch

from paceline.nested import mapped, tensors

Begun = TypeVar("Begun")


def on_its_way(batches: Iterator[Any], device: torch.device) -> Generator[Any]:
    """`batches` on `device`, in order."""
    if device.type != "cuda":
        for batch in batches:
            yield moved(batch, device)
        return
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # data on the GPU must be there before they are gathered

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
        for tensor in tensors(batch):  # the side stream must not reuse this memory for the next copy while it is read
            tensor.record_stream(current)
        return batch

    yield from one_ahead(begin, end)


def one_ahead(begin: Callable[[], Begun], end: Callable[[Begun], Any]) -> Generator[Any]:
    """What `end` makes of each thing that `begin` gives, until that raises StopIteration; one is begun ahead.

    Any other error of `begin` is raised when that thing is requested, not with the one before it.
    """
    try:
        begun = begin()
    except StopIteration:
        return
    while True:
        try:
            following = begin()
        except StopIteration:
            yield end(begun)
            return
        except Exception:
            yield end(begun)
            raise
        yield end(begun)
        begun = following


def moved(batch: Any, device: torch.device) -> Any:
    """`batch` with all its tensors on `device`."""
    return mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))
