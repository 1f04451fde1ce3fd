"""Brings batches onto the device; on a GPU, the next ones while the current ones are computed.

A step says when all of its work is launched (`Prefetch.begin`): while the GPU is busy with it, the host loads as many
batches as the step had, into page-locked memory, and begins their copies on a stream of its own. Where no step says so,
in an evaluation, one batch is begun before the one in front of it is handed out. On the CPU nothing is done ahead.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.nested import mapped, tensors

Begun = TypeVar("Begun")


class Prefetch:
    """What a step calls to have the next one's batches begun."""

    def __init__(self) -> None:
        self.taken = 0
        """batches that were handed out since the last `begin`"""
        self.more: Callable[[], object] = lambda: None
        """begins one more, of the data that are in use"""

    def begin(self) -> None:
        """Begin as many batches as were handed out since the last time; what goes wrong is raised when one is due."""
        count, self.taken = self.taken, 0
        for _ in range(count):
            self.more()


def on_its_way(batches: Iterator[Any], device: torch.device, ahead: Prefetch | None = None) -> Generator[Any]:
    """`batches` on `device`, in order; begun when `ahead` says so, or by themselves."""
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

    yield from one_ahead(begin, end, ahead)


def one_ahead(begin: Callable[[], Begun], end: Callable[[Begun], Any], ahead: Prefetch | None = None) -> Generator[Any]:
    """What `end` makes of each thing that `begin` gives, until that raises StopIteration.

    Things are begun when `ahead` says so, or when they are due; without it one is begun before another is handed out.
    Any other error of `begin` is raised when that thing is requested, not with the one before it.
    """
    waiting, failed = deque[Begun](), list[Exception]()

    def more() -> None:
        if not failed:
            try:
                waiting.append(begin())
            except Exception as error:
                failed.append(error)

    if ahead is not None:
        ahead.more = more
    try:
        while True:
            if not waiting:
                more()
            if not waiting:
                break
            begun = waiting.popleft()
            if ahead is None:
                more()
            else:
                ahead.taken += 1
            yield end(begun)
    finally:
        if ahead is not None and ahead.more is more:
            ahead.more, ahead.taken = (lambda: None), 0
    for error in failed:
        if not isinstance(error, StopIteration):
            raise error


def moved(batch: Any, device: torch.device) -> Any:
    """`batch` with all its tensors on `device`; to a GPU from page-locked memory, or the host would wait for it."""

    def there(tensor: Tensor) -> Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return mapped(batch, there)
