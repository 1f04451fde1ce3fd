"""What a call of a torch.distributed function is made of: its arguments, and its number within its group.

A collective's number is counted per group, from 1, and a call counts once: torch's own numbers also rise with messages
to a peer, and by several for calls that it makes out of others (`Group.own`).
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

from paceline.contract.box import NO_PEER, RECORDS, Box
from paceline.contract.evidence import Op


@dataclass(frozen=True)
class ReadingRule:
    """How to read one function's arguments. Only what all ranks of a call must agree on is kept."""

    tensor: str = ""  # the argument whose shape and type tell; a tensor, or a list of them
    shape: bool = True  # False where ranks may rightly pass different sizes
    peer: tuple[str, str] | None = None  # the arguments that name the other rank, or the root: of the world, the group
    message: bool = False  # between two ranks, not a collective
    single: bool = True  # raises torch's number by one; else by more, or by what the backend likes


_SOURCE, _TARGET = ("src", "group_src"), ("dst", "group_dst")
KINDS: Mapping[str, ReadingRule] = {
    "all_reduce": ReadingRule("tensor"),
    "all_reduce_coalesced": ReadingRule("tensors"),
    "broadcast": ReadingRule("tensor", peer=_SOURCE),
    "reduce": ReadingRule("tensor", peer=_TARGET),
    "all_gather": ReadingRule("tensor", shape=False),
    "all_gather_coalesced": ReadingRule("input_tensor_list", shape=False, single=False),
    "all_gather_single": ReadingRule("input_tensor"),
    "all_gather_into_tensor": ReadingRule("input_tensor"),
    "gather": ReadingRule("tensor", peer=_TARGET),
    "scatter": ReadingRule("tensor", peer=_SOURCE),
    "reduce_scatter": ReadingRule("output", shape=False, single=False),
    "reduce_scatter_single": ReadingRule("output"),
    "reduce_scatter_tensor": ReadingRule("output"),
    "all_to_all": ReadingRule("output_tensor_list", shape=False),
    "all_to_all_single": ReadingRule("input", shape=False),
    "barrier": ReadingRule(),
    "monitored_barrier": ReadingRule(single=False),
    "send": ReadingRule("tensor", peer=_TARGET, message=True),
    "recv": ReadingRule("tensor", peer=_SOURCE, message=True),
    "isend": ReadingRule("tensor", peer=_TARGET, message=True),
    "irecv": ReadingRule("tensor", peer=_SOURCE, message=True),
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
    enqueued: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    """of NCCL, whose calls return when the GPU has only been told: record and number of what may be on its way"""
    sent: int = 0  # and received
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

    def count_ahead(self, begun: Begun) -> None:
        """Note by how much torch's number has risen more than ours with a call that has returned."""
        after = torch_number(begun.backend, self)
        self.ahead += after - begun.before - begun.counts
        if begun.counts:
            self.spans.pop()  # the open one
        if after > begun.before:
            self.spans.append((begun.before, after, self.ahead))

    def returned(self, begun: Begun, result: Any, box: Box) -> None:
        """A call has returned, with a `Work` perhaps; end its record, unless it may be on its way."""
        if self.polled and hasattr(result, "is_completed"):
            self.pending.append((begun.record, weakref.ref(result)))
            return
        if self.polled:
            box.end(begun.record)
            return
        self.enqueued.append((begun.record, begun.number))
        if len(self.enqueued) > RECORDS // 2:  # so long ago that nobody needs to be asked
            box.end(self.enqueued.popleft()[0])

    def end_enqueued(self, pending: Collection[tuple[str, int]], box: Box) -> None:
        """End the records of all that is not `pending`, known by group and number."""
        for entry in [*self.enqueued]:
            if (self.name, entry[1]) not in pending:
                with suppress(ValueError):  # pushed out meanwhile, by the main thread
                    self.enqueued.remove(entry)
                box.end(entry[0])

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

    code: CodeType  # kept, as the next one, so that no other code can have its address
    inner: CodeType
    op: Op
    text: bytes
    order: int = 0  # a hash of what all ranks have in common, in the order of calls


class Begun(NamedTuple):  # made at every call: half the price of a dataclass
    """A call that is on its way."""

    record: int
    group: Group
    backend: Any
    before: int  # torch's number
    single: bool  # which the call raises by one
    counts: int  # 1 for a collective, 0 for a message
    number: int  # ours; of a message -1, -2, ...: how many this process has sent and received over the group


def torch_number(backend: Any, group: Group) -> int:
    """How many collectives torch has counted on this group."""
    try:
        return backend._get_sequence_number_for_group()
    except RuntimeError:  # MPI, and groups of two backends
        return group.calls


def peer_of(asked: list[Any], group: Group, kind: ReadingRule) -> int:
    """The other rank of a call, of the world, out of the arguments that may name it."""
    of_world, of_group = [*asked, None][:2]
    if of_world is not None:
        return of_world
    if of_group is not None:
        return group.members[of_group]
    return NO_PEER if kind.message else 0  # from anybody; torch's default for a root


def leave_untraced(code: CodeType) -> None:
    """Have torch.compile run frames of this code, and what they call, as they are; without importing its compiler."""
    frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    with suppress(AttributeError, TypeError):  # a torch with other names: then it is traced, in vain but rightly
        action = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action, action))
