"""Writes down which collectives a script calls over all ranks: agents compare in which order ranks do."""

from __future__ import annotations

import zlib

from msgspec.structs import replace

from paceline.contract.box import Box, ring_text
from paceline.contract.evidence import Op
from paceline.contract.marks import GROUPS, Names, Order, put_call
from paceline.contract.order import ROOTED


def order_hash(op: Op) -> int:
    """Of what all ranks must have in common: not the line where code asks for the rank, nor where it gives names."""
    return zlib.crc32(ring_text(replace(op, site="") if op.name or op.kind in ROOTED else op))


class OrderMarks:
    """Of this process, over the first groups of all ranks."""

    def __init__(self, box: Box, names: Names) -> None:
        self._box, self._names = box, names
        self._groups: dict[str, tuple[int, Order]] = {}

    def note(self, group: str, members: int, call: int, text: bytes) -> None:
        """A call: how it is hashed, and what it is."""
        if group not in self._groups:
            self._groups[group] = len(self._groups), Order(zlib.crc32(group.encode()), members, 0, ())
            self._box.put("marks", self._box.get("marks") + 1)
        table, order = self._groups[group]
        if table < GROUPS:
            self._names.of_call(call, text)
            put_call(self._box, table, order, call)
            self._groups[group] = table, order._replace(made=order.made + 1)
