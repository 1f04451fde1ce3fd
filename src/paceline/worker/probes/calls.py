"""Marks which collectives a script calls over all ranks: ranks that call others, or in another order, mark others."""

from __future__ import annotations

import zlib

from msgspec.structs import replace

from paceline.contract.box import Box, ring_text
from paceline.contract.evidence import Op
from paceline.contract.marks import ORDER_TABLES, PARTS, TABLES, Mark, Names, put_mark
from paceline.contract.order import ROOTED


def order_hash(op: Op) -> int:
    """Of what all ranks must have in common: not the line where code asks for the rank, nor where it gives names."""
    return zlib.crc32(ring_text(replace(op, site="") if op.name or op.kind in ROOTED else op))


class OrderMarks:
    """Of this process, over the first groups of all ranks: a mark for every few calls."""

    def __init__(self, box: Box, names: Names) -> None:
        self._box, self._names = box, names
        self._groups: dict[str, tuple[int, list[int], int]] = {}  # its table, its last calls, how many marks

    def note(self, group: str, members: int, order: int, text: bytes) -> None:
        """A call: how it is to be hashed, and what it is."""
        self._names.of_call(order, text)
        table, calls, marks = self._groups.get(group) or (ORDER_TABLES + len(self._groups), [], 0)
        calls.append(order)
        if len(calls) == PARTS and table < TABLES:
            marks += 1
            flags, layout = table | members << 16, zlib.crc32(group.encode())
            put_mark(self._box, Mark(marks, layout, flags, (0,) * PARTS, (*calls,), (0.0,) * PARTS))
        if len(calls) == PARTS:
            calls.clear()
        self._groups[group] = table, calls, marks
