"""Helpers of the probes: values read from tensors and batches."""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from paceline.protocol.facts import MAX_DIGESTS

MAX_PENDING = 64  # reads in flight
MAX_ELEMENTS = 1 << 16  # of a tensor that are read: tensors that differ as a whole differ in these
MAX_DEPTH = 5


class DeferredReads:
    """Reads values of a device a step or two later, so that the host never waits for them."""

    def __init__(self) -> None:
        self._coming: deque[tuple[Any, Any, Callable[[list[Any]], None]]] = deque(maxlen=MAX_PENDING)

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
        """Handle the values that have arrived."""
        while self._coming and self._coming[0][0].query():
            _, copy, then = self._coming.popleft()
            then(copy.tolist())


def may_compute(tensor: Any) -> bool:
    """Whether something may be computed of this tensor now: not while a CUDA graph is captured."""
    return not tensor.is_cuda or not sys.modules["torch"].cuda.is_current_stream_capturing()


def hashed(data: bytes) -> str:
    """Sixteen hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def some_of(tensor: Any, most: int = MAX_ELEMENTS) -> Any:
    """Some of its elements, evenly over the whole."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // most) or 1]


def digest_of(tensors: Iterable[Any], most: int = MAX_ELEMENTS) -> str:
    """One digest of several tensors, which may be None."""
    torch: Any = sys.modules["torch"]
    kept = (None if one is None else some_of(one, most).cpu().contiguous().view(torch.uint8) for one in tensors)
    return hashed(b"".join(b"-" if one is None else bytes(one.numpy()) for one in kept))


def leaf_digests(batch: Any, depth: int = 0, most: int = MAX_ELEMENTS, *, constants: bool = False) -> list[str]:
    """The digests of all tensors, arrays and numbers in a batch, in order; "f:" before floating point.

    Empty for a tensor whose elements are all equal, except with `constants`.
    """
    torch: Any = sys.modules["torch"]
    if isinstance(batch, torch.Tensor):
        some = some_of(batch, most)
        if not constants and batch.dim() and some.numel() and bool((some == some[0]).all()):
            return [""]
        return [("f:" if batch.is_floating_point() else "") + digest_of([some], most)]
    inner: Any = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else None
    if depth < MAX_DEPTH and inner is not None:
        leaves = (leaf for value in inner for leaf in leaf_digests(value, depth + 1, most, constants=constants))
        return [*islice(leaves, MAX_DIGESTS)]
    if type(batch).__module__ == "numpy" and (data := getattr(batch, "tobytes", None)) is not None:
        return [hashed(data())]
    return [hashed(repr(batch).encode())] if isinstance(batch, (str, bytes, int, float)) else [""]


def leading(batch: Any, depth: int = 0) -> int:
    """The number of samples in a batch: the first dimension of its first tensor; 0: unknown."""
    if hasattr(batch, "shape") and len(batch.shape):
        return int(batch.shape[0])
    inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for value in inner if depth < MAX_DEPTH and (size := leading(value, depth + 1))), 0)
