"""Marks on the status page: values that must be equal on ranks at a step. Ranks write them, agents compare them
(guard/silent.py); and the comparison of the order of collectives.

A mark is kept by its number so that agents that look at different moments, and seldom, find numbers in common however
fast steps are: the last few odd numbers, the last few that are odd multiples of 2, of 4, and so on: replicas that have
drifted stay different. Collectives that are called in a different order once are in order again: so the last LAST_CALLS
are all kept. The region also has the names of tensors and calls, and the findings of a rank.

    917504      tables               TABLES of LEVELS x KEPT marks, one for each optimizer
                orders               GROUPS, one for each group of all ranks: its last calls' hashes
     + 64 KiB   names                JSON: of the tensors, by layout; of the calls, by hash
     + 96 KiB   findings             the last 8, JSON
"""

import os
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec

from paceline.protocol.evidence import Op, ScriptFinding
from paceline.protocol.status_page import MARKS_AT, StatusPage, op_of

TABLES = 4
LEVELS, KEPT = 11, 8  # a script that ends before it is looked at twice leaves enough to be judged by
PARTS = 4  # of a mark
MOST_CALLS = 64
# number, layout, table and flags, which parts, hashes, sums, settings, number again: a torn one is known by it
MARK = struct.Struct("@QII4I4Q4f4fQ")
SETTINGS = ("lr", "weight_decay", "momentum", "betas")  # of the optimizer
TABLE_BYTES = LEVELS * KEPT * MARK.size
# count of calls, hash of the group's name, how many ranks it has; then a ring of hashes, 4 bytes each
ORDER, GROUPS, LAST_CALLS = struct.Struct("@QII"), 4, 1024
UNSURE = 32  # of the oldest: they may be overwritten while somebody reads
ORDERS_AT, ORDER_BYTES = MARKS_AT + TABLES * TABLE_BYTES, ORDER.size + 4 * LAST_CALLS
NAMES_AT, NAMES_MAX = MARKS_AT + (1 << 16), 1 << 15
FINDINGS_AT, FINDINGS, FINDING_MAX = NAMES_AT + NAMES_MAX, 8, 4096
SAME_BY_DDP, SUMMED = 1 << 8, 1 << 9  # flags: DDP has made and keeps them equal; the sums are there
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})  # code asks `rank == root` around these


class ReplicaFingerprint(NamedTuple):
    """A fingerprint of a rank's parameters after a step."""

    number: int  # of the optimizer's step
    layout: int  # a hash of what is compared: names and shapes
    flags: int
    parts: tuple[int, ...]  # which tensors
    hashes: tuple[int, ...]
    sums: tuple[float, ...]
    settings: tuple[float, ...] = (0.0,) * len(SETTINGS)  # added up over parameter groups

    @property
    def table(self) -> int:
        """Which of the tables it is in."""
        return self.flags & 0xFF

    @property
    def parties(self) -> int:
        """The number of ranks on which it must be equal."""
        return self.flags >> 16


class Order(NamedTuple):
    """The last collectives that a rank has called over one group of all ranks."""

    group: int  # a hash of its name
    parties: int
    made: int  # of all calls so far
    calls: tuple[int, ...]  # hashes, the oldest first

    @property
    def first(self) -> int:
        """The number of the oldest known call, from 0."""
        return self.made - len(self.calls)


def put_call(own: StatusPage, table: int, order: Order, call: int) -> None:
    """Write one more call; `order` is the table before it, without its calls."""
    at = ORDERS_AT + table * ORDER_BYTES
    own.store(at + ORDER.size + order.made % LAST_CALLS * 4, call.to_bytes(4, sys.byteorder))
    own.store(at, ORDER.pack(order.made + 1, order.group, order.parties))


def read_orders(descriptor: int) -> bytes:
    """All calls that a worker has written down, to be sent."""
    data = os.pread(descriptor, GROUPS * ORDER_BYTES, ORDERS_AT)
    later = os.pread(descriptor, GROUPS * ORDER_BYTES, ORDERS_AT)
    return b"".join(
        data[at : at + ORDER_BYTES]
        for at in range(0, len(data), ORDER_BYTES)
        if any(data[at : at + 8]) and _is_whole(data[at : at + ORDER.size], later[at : at + ORDER.size])
    )


def _is_whole(before: bytes, after: bytes) -> bool:
    """Whether a table that was read between these two headers is whole, except for its UNSURE oldest calls: a worker
    may make many calls while the agent waits for a core.
    """
    if len(before) < ORDER.size or len(after) < ORDER.size:
        return False
    (count, group, parties), (count_after, *others) = ORDER.unpack(before), ORDER.unpack(after)
    return [group, parties] == others and 0 <= count_after - count < UNSURE


def orders_of(data: bytes) -> list[Order]:
    """The tables in these bytes, by group."""
    found: list[Order] = []
    for at in range(0, len(data) - ORDER_BYTES + 1, ORDER_BYTES):
        count, group, parties = ORDER.unpack_from(data, at)
        ring = struct.unpack_from(f"@{LAST_CALLS}I", data, at + ORDER.size)
        known = min(count, LAST_CALLS - UNSURE)
        found.append(Order(group, parties, count, tuple(ring[n % LAST_CALLS] for n in range(count - known, count))))
    return found


def put_fingerprint(own: StatusPage, mark: ReplicaFingerprint) -> None:
    """Write a mark down."""
    level = min((mark.number & -mark.number).bit_length() - 1, LEVELS - 1)
    slot = level * KEPT + (mark.number >> (level + 1)) % KEPT
    at = MARKS_AT + mark.table * TABLE_BYTES + slot * MARK.size
    data = MARK.pack(*mark[:3], *mark.parts, *mark.hashes, *mark.sums, *mark.settings, mark.number)
    own.store_record(at, data)
    own.put("marks", own.get("marks") + 1)


class Names:
    """The names of a worker's marked tensors and calls."""

    def __init__(self, own: StatusPage) -> None:
        self._own = own
        self._tensors: dict[str, list[str]] = {}
        self._calls: dict[str, str] = {}

    def of_tensors(self, layout: int, names: list[str]) -> None:
        """Set the names of the parts of a layout."""
        self._tensors[str(layout)] = names
        self._put()

    def of_call(self, order: int, text: bytes) -> None:
        """Set the call that has this hash."""
        if str(order) not in self._calls and len(self._calls) < MOST_CALLS:
            self._calls[str(order)] = text.decode(errors="replace")
            self._put()

    def _put(self) -> None:
        for tensors in (self._tensors, {}):  # too many have no names
            data = msgspec.json.encode(Named(tensors, self._calls))
            if len(data) < NAMES_MAX:
                self._own.store(NAMES_AT, data + b"\0")
                return


class Named(msgspec.Struct, frozen=True):
    """The names as JSON on the status page."""

    tensors: dict[str, list[str]] = {}
    calls: dict[str, str] = {}


def put_finding(own: StatusPage, finding: ScriptFinding) -> None:
    """Report a finding to the agent."""
    told = own.get("findings")
    data = msgspec.json.encode(finding)
    own.store(FINDINGS_AT + told % FINDINGS * FINDING_MAX, data[: FINDING_MAX - 1] + b"\0")
    own.put("findings", told + 1)


def read_marks(descriptor: int) -> bytes:
    """All marks that a worker has written down, to be sent."""
    data = os.pread(descriptor, TABLES * TABLE_BYTES, MARKS_AT)
    found = (data[at : at + MARK.size] for at in range(0, len(data) - MARK.size + 1, MARK.size))
    return b"".join(one for one in found if any(one[:8]))


def fingerprints_of(data: bytes) -> list[ReplicaFingerprint]:
    """The marks in these bytes, without those that are half written."""
    whole = MARK.iter_unpack(data[: len(data) // MARK.size * MARK.size])
    return [ReplicaFingerprint(m[0], m[1], m[2], m[3:7], m[7:11], m[11:15], m[15:19]) for m in whole if m[0] == m[19]]


def read_names(descriptor: int) -> Named:
    """The names of the marked tensors and calls."""
    data = os.pread(descriptor, NAMES_MAX, NAMES_AT).partition(b"\0")[0]
    try:
        return msgspec.json.decode(data, type=Named)
    except (msgspec.MsgspecError, RecursionError):
        return Named()


def read_calls(descriptor: int) -> dict[str, Op]:
    """The calls of the worker, by the hash in its marks."""
    return {key: op_of(text.encode()) for key, text in read_names(descriptor).calls.items()}


def read_findings(descriptor: int) -> Sequence[ScriptFinding]:
    """The findings of a worker, in no order."""
    found: list[ScriptFinding] = []
    for number in range(FINDINGS):
        data = os.pread(descriptor, FINDING_MAX, FINDINGS_AT + number * FINDING_MAX).partition(b"\0")[0]
        try:
            found.append(msgspec.json.decode(data, type=ScriptFinding))
        except (msgspec.MsgspecError, RecursionError):
            continue
    return found


@dataclass(frozen=True)
class Mismatch:
    """The first call at which the ranks part; `odd` are those in the minority, none without a majority."""

    calls: tuple[Op | None, ...]  # by rank; None: it had called nothing more
    odd: tuple[int, ...]

    @property
    def words(self) -> str:
        """Who called what."""
        told = [rank for rank in range(len(self.calls)) if not self.odd or rank in self.odd]
        words = "; ".join(f"rank {rank} called {_call(self.calls[rank])}" for rank in told)
        if not self.odd:
            return words + "; no majority says which is right"
        usual = next(call for rank, call in enumerate(self.calls) if rank not in self.odd)
        return words + f" where all others called {_call(usual)}"


def compare_orders(
    histories: Sequence[Sequence[Op]], local: frozenset[str], known: frozenset[str] = frozenset()
) -> Mismatch | frozenset[str]:
    """The mismatch between the ranks' calls (the oldest first), or all lines that belong to single ranks.

    `local` are the known lines of single ranks, which are left out. `known` are lines from which all ranks have called
    in earlier steps.
    """
    counts = [Counter(op.site for op in history) for history in histories]
    sites = {site for count in counts for site in count}
    local |= {site for site in sites if len({count[site] for count in counts}) > 1}
    for group in dict.fromkeys(op.group for history in histories for op in history):
        of_group = [[op for op in history if op.group == group] for history in histories]
        labels = [tuple(order_label(op, local) for op in ops) for ops in of_group]
        if len(set(labels)) > 1:
            return _mismatch(of_group, labels)
        if departure := _departure(of_group, known):
            return departure
    return local


def order_label(op: Op, local: frozenset[str]) -> tuple[str, ...]:
    """The part of a call that must be equal on ranks."""
    # a name says more than a line: the same bucket leaves from backward on one rank, and after it on another
    shown = "" if op.name or op.kind in ROOTED or op.site in local else op.site
    return (*op.signature, shown)


def _departure(of_group: Sequence[Sequence[Op]], known: frozenset[str]) -> Mismatch | None:
    """The first of two equal calls in a row that some ranks made from unknown lines and the others from known lines.

    The signatures of the calls are equal on all ranks.
    """
    for first, second in pairwise(zip(*of_group, strict=True)):
        if first[0].signature != second[0].signature or first[0].name or first[0].kind in ROOTED:
            continue
        left = [rank for rank, ops in enumerate(zip(first, second, strict=True)) if not known & {op.site for op in ops}]
        stayed = [rank for rank, ops in enumerate(zip(first, second, strict=True)) if known >= {op.site for op in ops}]
        if left and stayed and len(left) + len(stayed) == len(first):
            return Mismatch(first, tuple(left))
    return None


def _mismatch(of_group: Sequence[Sequence[Op]], labels: Sequence[tuple[tuple[str, ...], ...]]) -> Mismatch:
    (common, votes), *_ = Counter(labels).most_common()
    at = next(i for i in range(max(map(len, labels))) if len({line[i : i + 1] for line in labels}) > 1)
    calls = tuple(ops[at] if at < len(ops) else None for ops in of_group)
    majority = 2 * votes > len(labels)
    return Mismatch(calls, tuple(r for r, line in enumerate(labels) if line != common) if majority else ())


def _call(op: Op | None) -> str:
    if op is None:
        return "nothing more"
    name = f" '{op.name}'" if op.name else ""
    return f"{op.kind}{name} {op.shape} {op.dtype}".rstrip() + (f" at {op.site}" if op.site else "")
