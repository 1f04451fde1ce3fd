"""What is a call of a torch.distributed function made of? How to read its arguments, and how its group counts it.

A collective's number is counted per group, from 1, and a call counts once: torch's own numbers also rise with messages
to a peer, and by several for calls that it makes out of others (`Group.own`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

from paceline.contract.box import RECORDS, Box
from paceline.contract.evidence import Op


@dataclass(frozen=True)
class Kind:
    """How to read one function's arguments. Only what all ranks of a call must agree on is kept."""

    tensor: str = ""  # the argument whose shape and type tell; a tensor, or a list of them
    shape: bool = True  # False where ranks may rightly pass different sizes
    peer: tuple[str, str] | None = None  # the arguments that name the other rank, or the root: of the world, the group
    message: bool = False  # between two ranks, not a collective
    single: bool = True  # raises torch's number by one; else by more, or by what the backend likes


_SOURCE, _TARGET = ("src", "group_src"), ("dst", "group_dst")
KINDS: Mapping[str, Kind] = {
    "all_reduce": Kind("tensor"),
    "all_reduce_coalesced": Kind("tensors"),
    "broadcast": Kind("tensor", peer=_SOURCE),
    "reduce": Kind("tensor", peer=_TARGET),
    "all_gather": Kind("tensor", shape=False),
    "all_gather_coalesced": Kind("input_tensor_list", shape=False, single=False),
    "all_gather_single": Kind("input_tensor"),
    "all_gather_into_tensor": Kind("input_tensor"),
    "gather": Kind("tensor", peer=_TARGET),
    "scatter": Kind("tensor", peer=_SOURCE),
    "reduce_scatter": Kind("output", shape=False, single=False),
    "reduce_scatter_single": Kind("output"),
    "reduce_scatter_tensor": Kind("output"),
    "all_to_all": Kind("output_tensor_list", shape=False),
    "all_to_all_single": Kind("input", shape=False),
    "barrier": Kind(),
    "monitored_barrier": Kind(single=False),
    "send": Kind("tensor", peer=_TARGET, message=True),
    "recv": Kind("tensor", peer=_SOURCE, message=True),
    "isend": Kind("tensor", peer=_TARGET, message=True),
    "irecv": Kind("tensor", peer=_SOURCE, message=True),
}
SAME = {  # another name, or the other way to wait, for what is one call to the other ranks
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "isend": "send",
    "irecv": "recv",
}


@dataclass
class Group:
    """What has been called over one process group."""

    name: str
    of_all: bool  # all ranks of the world are members
    members: tuple[int, ...]
    polled: bool  # a work may be asked whether it is completed, at any time
    still_there: weakref.ref[Any]
    spans: deque[tuple[int, float, int]] = field(default_factory=lambda: deque[tuple[int, float, int]](maxlen=512))
    """where torch's numbers run ahead: (the number before a call, after it, by how many all such calls so far)"""
    ahead: int = 0
    calls: int = 0  # for backends that do not count
    messages: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    pending: deque[tuple[int, weakref.ref[Any]]] = field(
        default_factory=lambda: deque[tuple[int, weakref.ref[Any]]](maxlen=RECORDS)
    )
    checksum: int = 0
    count: int = 0

    def own(self, number: int) -> int | None:
        """Our number for torch's; None for what belongs to a call that counts once, or is too long ago to know."""
        if len(self.spans) == self.spans.maxlen and number <= self.spans[0][0]:
            return None
        ahead = 0
        for before, after, total in self.spans:
            if number <= before:
                break
            if number <= after:
                return None
            ahead = total
        return number - ahead

    def sweep(self, box: Box) -> None:
        """End the records of asynchronous calls that are over by now, up to the first that is not."""
        while self.pending:
            entry = self.pending.popleft()
            work = entry[1]()
            if work is not None and not work.is_completed():  # None: nobody can wait for it any more
                self.pending.appendleft(entry)
                return
            box.end(entry[0])


@dataclass(frozen=True)
class Known:
    """One call as it comes again and again: at this line, with these arguments."""

    code: CodeType  # kept, so that no other code can have its address
    op: Op
    text: bytes


class Begun(NamedTuple):  # made at every call: half the price of a dataclass
    """A call that is on its way."""

    record: int
    group: Group
    backend: Any
    before: int  # torch's number
    single: bool  # which the call raises by one
    counts: int  # 1 for a collective, 0 for a message
