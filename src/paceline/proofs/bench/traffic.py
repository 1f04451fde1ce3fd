"""Counts the bytes that a rank sends in a step, from the collectives that were called.

torch's flight recorder has every collective of a process group with its shapes, also those that C++ calls (DDP, FSDP);
what goes through shared memory is in the guard's ring. The volume is that of a ring, which no algorithm undercuts
where all ranks must get all of n ranks' sums: 2 (n-1)/n of an all-reduce's bytes, (n-1) times what each puts into an
all-gather, (n-1)/n of what each puts into a reduce-scatter or an all-to-all.
"""

import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from paceline.contract.box import Box
from paceline.contract.evidence import Op

SHARED = "shared"
"""what the ring calls the group that exchanges through memory"""
ELEMENT_BYTES = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Int": 4, "Long": 8,
}  # fmt: skip
_SHAPE = re.compile(r"\[([0-9, ]*)\]")


class Traffic:
    """Counts from when it is made, and again from each call of `sent`."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._last, self._since_ns = _newest(), time.monotonic_ns()

    def sent(self, world_size: int) -> float | None:
        """Bytes that this rank has sent; None where nothing was recorded of what several ranks must have sent."""
        entries = [entry for entry in _entries() if entry["record_id"] > self._last]
        shared = [op for began_ns, op in self._box.ring() if began_ns >= self._since_ns and op.group == SHARED]
        self._last, self._since_ns = _newest(), time.monotonic_ns()
        if not entries and not shared:
            return 0.0 if world_size == 1 else None
        found = [volume(_kind(entry), _bytes(entry), world_size) for entry in entries]
        return sum(found) + sum(volume(op.kind, op_bytes(op), world_size) for op in shared)


def volume(kind: str, size: int, ranks: int) -> float:
    """Bytes that each of `ranks` sends in a collective into which each puts `size` bytes."""
    if kind.startswith(("all_reduce", "allreduce")):
        return 2 * (ranks - 1) / ranks * size
    if kind.startswith(("all_gather", "_all_gather")):
        return (ranks - 1) * size
    return (ranks - 1) / ranks * size  # reduce-scatter, all-to-all, broadcast


def op_bytes(op: Op) -> int:
    """The size of a record of the guard's ring, in bytes."""
    kind: Any = getattr(torch, op.dtype, None)
    size = kind.itemsize if isinstance(kind, torch.dtype) else 4
    return size * sum(_product(part.split(",")) for part in _SHAPE.findall(op.shape))


def _kind(entry: dict[str, Any]) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2]


def _bytes(entry: dict[str, Any]) -> int:
    return sum(
        ELEMENT_BYTES.get(dtype, 4) * _product(sizes)
        for sizes, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    )


def _product(sizes: Sequence[Any]) -> int:
    total = 1
    for size in sizes:
        total *= int(size) if str(size).strip() else 1
    return total


def _newest() -> int:
    return max((entry["record_id"] for entry in _entries()), default=-1)


def _entries() -> list[dict[str, Any]]:
    binding = sys.modules.get("torch._C._distributed_c10d")
    dump: Any = getattr(binding, "_dump_fr_trace_json", None)
    return [] if dump is None else msgspec.json.decode(dump(True, False)).get("entries", [])
