"""Reads what a device computes a step or two later, when it is there anyway: a script's device is never waited for."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

MOST = 64  # on their way


class Later:
    """What is on its way."""

    def __init__(self) -> None:
        self._coming: deque[tuple[Any, Any, Callable[[list[Any]], None]]] = deque(maxlen=MOST)

    def read(self, values: Any, then: Callable[[list[Any]], None]) -> None:
        """Call `then` with the numbers in this tensor: now if they are the host's, else in a later `look`."""
        if not values.is_cuda:
            then(values.tolist())
            return
        event = sys.modules["torch"].cuda.Event()
        copy = values.to("cpu", non_blocking=True)
        event.record()
        self._coming.append((event, copy, then))

    def look(self) -> None:
        """See what has come."""
        while self._coming and self._coming[0][0].query():
            _, copy, then = self._coming.popleft()
            then(copy.tolist())


def may_compute(tensor: Any) -> bool:
    """Whether something may be computed of this tensor now: not while a CUDA graph is captured."""
    return not tensor.is_cuda or not sys.modules["torch"].cuda.is_current_stream_capturing()
