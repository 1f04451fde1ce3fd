"""The marks region of the status page, and the comparison of the order of collectives.

Ranks write fingerprints of values that must be equal on ranks after a step. Agents compare them (guard/silent.py). The
agents read at different moments and rarely. The page therefore keeps the last fingerprints of odd steps, of odd
multiples of 2, of 4, and so on, so that agents always find common steps. This is sufficient because replicas that have
diverged stay different. A different order of collectives may last for one call only, so the page keeps all of the last
LAST_CALLS calls. The region also contains the names of tensors and calls, and the findings of a rank.

    917504      tables               TABLES of LEVELS x KEPT fingerprints, one for each optimizer
                orders               GROUPS, one for each group of all ranks: hashes of its last calls
     + 64 KiB   names                JSON: of the tensors, by layout; of the calls, by hash
     + 96 KiB   findings             the last 8, JSON
"""

import os
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec

from paceline.protocol.evidence import Op, ScriptFault
from paceline.protocol.status_page import MARKS_AT, StatusPage, decode_op, read_c_string

TABLES = 4
LEVELS, KEPT = 11, 8  # sufficient also for a short script, which the agent reads only once
PARTS = 4  # of a fingerprint
MAX_NAMED_CALLS = 64
# number, layout, table and flags, parts, hashes, sums, settings, and the number again, to detect partial writes
MARK = struct.Struct("@QII4I4Q4f4fQ")
SETTINGS = ("lr", "weight_decay", "momentum", "betas")  # of the optimizer
TABLE_BYTES = LEVELS * KEPT * MARK.size
# number of calls, hash of the group's name, number of its ranks; then a ring of hashes, 4 bytes each
ORDER, GROUPS, LAST_CALLS = struct.Struct("@QII"), 4, 1024
NUM_UNSTABLE_CALLS = 32  # oldest calls, which a writer may overwrite during a read
ORDERS_AT, ORDER_BYTES = MARKS_AT + TABLES * TABLE_BYTES, ORDER.size + 4 * LAST_CALLS
NAMES_AT, NAMES_MAX = MARKS_AT + (1 << 16), 1 << 15
FINDINGS_AT, FINDINGS, FINDING_MAX = NAMES_AT + NAMES_MAX, 8, 4096
BY_DDP, SUMMED = 1 << 8, 1 << 9  # flags: DDP made the parameters equal and keeps them so; the sums are valid
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})  # scripts call these in branches on `rank == root`


class ReplicaFingerprint(NamedTuple):
    optimizer_step: int  # the step of the optimizer
    layout: int  # a hash of the names and shapes
    flags: int
    tensor_indices: tuple[int, ...]  # indices of the tensors
    hashes: tuple[int, ...]
    sums: tuple[float, ...]
    settings: tuple[float, ...] = (0.0,) * len(SETTINGS)  # sums over parameter groups

    @property
    def table_index(self) -> int:
        return self.flags & 0xFF

    @property
    def num_ranks(self) -> int:
        return self.flags >> 16


class CallHistory(NamedTuple):
    group: int  # a hash of its name
    num_ranks: int
    num_calls: int  # number of calls so far
    calls: tuple[int, ...]  # hashes, the oldest first

    @property
    def first_call_number(self) -> int:
        return self.num_calls - len(self.calls)


def append_call(own: StatusPage, table: int, order: CallHistory, call: int) -> None:
    """Append a call to a table; `order` is the table before it, without its calls."""
    at = ORDERS_AT + table * ORDER_BYTES
    own.store(at + ORDER.size + order.num_calls % LAST_CALLS * 4, call.to_bytes(4, sys.byteorder))
    own.store(at, ORDER.pack(order.num_calls + 1, order.group, order.num_ranks))


def read_call_table_bytes(descriptor: int) -> bytes:
    data = os.pread(descriptor, GROUPS * ORDER_BYTES, ORDERS_AT)
    later_data = os.pread(descriptor, GROUPS * ORDER_BYTES, ORDERS_AT)
    return b"".join(
        data[at : at + ORDER_BYTES]
        for at in range(0, len(data), ORDER_BYTES)
        if any(data[at : at + 8]) and _is_whole(data[at : at + ORDER.size], later_data[at : at + ORDER.size])
    )


def _is_whole(before: bytes, after: bytes) -> bool:
    """Whether a table that was read between these two headers is valid, except for its NUM_UNSTABLE_CALLS oldest calls.

    A worker may make many calls while the agent waits for a core.
    """
    if len(before) < ORDER.size or len(after) < ORDER.size:
        return False
    (count, group, parties), (count_after, *others) = ORDER.unpack(before), ORDER.unpack(after)
    return [group, parties] == others and 0 <= count_after - count < NUM_UNSTABLE_CALLS


def parse_call_tables(data: bytes) -> list[CallHistory]:
    orders: list[CallHistory] = []
    for at in range(0, len(data) - ORDER_BYTES + 1, ORDER_BYTES):
        count, group, parties = ORDER.unpack_from(data, at)
        ring = struct.unpack_from(f"@{LAST_CALLS}I", data, at + ORDER.size)
        num_safe = min(count, LAST_CALLS - NUM_UNSTABLE_CALLS)
        calls = tuple(ring[n % LAST_CALLS] for n in range(count - num_safe, count))
        orders.append(CallHistory(group, parties, count, calls))
    return orders


def put_replica_fingerprint(page: StatusPage, mark: ReplicaFingerprint) -> None:
    level = min((mark.optimizer_step & -mark.optimizer_step).bit_length() - 1, LEVELS - 1)
    slot = level * KEPT + (mark.optimizer_step >> (level + 1)) % KEPT
    at = MARKS_AT + mark.table_index * TABLE_BYTES + slot * MARK.size
    data = MARK.pack(*mark[:3], *mark.tensor_indices, *mark.hashes, *mark.sums, *mark.settings, mark.optimizer_step)
    page.store_record(at, data)
    page.put("marks", page.get("marks") + 1)


class NamesWriter:
    def __init__(self, own: StatusPage) -> None:
        self._own = own
        self._tensors: dict[str, list[str]] = {}
        self._calls: dict[str, str] = {}

    def set_tensor_names(self, layout: int, names: list[str]) -> None:
        self._tensors[str(layout)] = names
        self._put()

    def set_call(self, order: int, text: bytes) -> None:
        if str(order) not in self._calls and len(self._calls) < MAX_NAMED_CALLS:
            self._calls[str(order)] = text.decode(errors="replace")
            self._put()

    def _put(self) -> None:
        for tensors in (self._tensors, {}):  # too many names: none
            data = msgspec.json.encode(TensorAndCallNames(tensors, self._calls))
            if len(data) < NAMES_MAX:
                self._own.store(NAMES_AT, data + b"\0")
                return


class TensorAndCallNames(msgspec.Struct, frozen=True):
    tensors: dict[str, list[str]] = {}
    calls: dict[str, str] = {}


def write_script_finding(own: StatusPage, finding: ScriptFault) -> None:
    count = own.get("findings")
    data = msgspec.json.encode(finding)
    own.store(FINDINGS_AT + count % FINDINGS * FINDING_MAX, data[: FINDING_MAX - 1] + b"\0")
    own.put("findings", count + 1)


def read_fingerprint_bytes(descriptor: int) -> bytes:
    data = os.pread(descriptor, TABLES * TABLE_BYTES, MARKS_AT)
    slots = (data[at : at + MARK.size] for at in range(0, len(data) - MARK.size + 1, MARK.size))
    return b"".join(slot for slot in slots if any(slot[:8]))


def parse_fingerprints(data: bytes) -> list[ReplicaFingerprint]:
    """The fingerprints in the bytes of `read_fingerprint_bytes`, without partial writes."""
    marks = MARK.iter_unpack(data[: len(data) // MARK.size * MARK.size])
    return [ReplicaFingerprint(m[0], m[1], m[2], m[3:7], m[7:11], m[11:15], m[15:19]) for m in marks if m[0] == m[19]]


def read_tensor_and_call_names(descriptor: int) -> TensorAndCallNames:
    try:
        return msgspec.json.decode(read_c_string(descriptor, NAMES_AT, NAMES_MAX), type=TensorAndCallNames)
    except (msgspec.MsgspecError, RecursionError):
        return TensorAndCallNames()


def read_calls(descriptor: int) -> dict[str, Op]:
    return {key: decode_op(text.encode()) for key, text in read_tensor_and_call_names(descriptor).calls.items()}


def read_findings(descriptor: int) -> Sequence[ScriptFault]:
    findings: list[ScriptFault] = []
    for number in range(FINDINGS):
        data = read_c_string(descriptor, FINDINGS_AT + number * FINDING_MAX, FINDING_MAX)
        with suppress(msgspec.MsgspecError, RecursionError):
            findings.append(msgspec.json.decode(data, type=ScriptFault))
    return findings


@dataclass(frozen=True)
class CallMismatch:
    """The first call in which ranks differ. `minority_ranks` is empty without a majority."""

    calls: tuple[Op | None, ...]  # by rank; None: the rank made no further call
    minority_ranks: tuple[int, ...]

    @property
    def words(self) -> str:
        shown_ranks = self.minority_ranks or range(len(self.calls))
        text = "; ".join(f"rank {rank} called {_call(self.calls[rank])}" for rank in shown_ranks)
        if not self.minority_ranks:
            return text + "; without a majority, either may be wrong"
        majority_call = next(call for rank, call in enumerate(self.calls) if rank not in self.minority_ranks)
        return text + f", while all others called {_call(majority_call)}"


def compare_call_orders(
    histories: Sequence[Sequence[Op]], rank_local_lines: frozenset[str], common_lines: frozenset[str] = frozenset()
) -> CallMismatch | frozenset[str]:
    """The mismatch between the ranks' calls (the oldest first), or all lines that only some ranks use.

    The comparison ignores `rank_local_lines`, which only some ranks use. From `common_lines`, all ranks have called in
    earlier steps.
    """
    counts = [Counter(op.site for op in history) for history in histories]
    sites = {site for count in counts for site in count}
    rank_local_lines |= {site for site in sites if len({count[site] for count in counts}) > 1}
    for group in dict.fromkeys(op.group for history in histories for op in history):
        ops_by_rank = [[op for op in history if op.group == group] for history in histories]
        labels = [tuple(compared_call_parts(op, rank_local_lines) for op in ops) for ops in ops_by_rank]
        if len(set(labels)) > 1:
            return _mismatch(ops_by_rank, labels)
        if departure := _departure(ops_by_rank, common_lines):
            return departure
    return rank_local_lines


def compared_call_parts(op: Op, local: frozenset[str]) -> tuple[str, ...]:
    """The part of a call that must be equal on ranks."""
    # A name replaces the line: one rank may send a bucket during backward, another rank after it.
    shown_site = "" if op.name or op.kind in ROOTED or op.site in local else op.site
    return (*op.signature, shown_site)


def _departure(ops_by_rank: Sequence[Sequence[Op]], known: frozenset[str]) -> CallMismatch | None:
    """The first of two equal calls in a row that some ranks made from unknown lines and the others from known lines.

    The signatures of the calls are equal on all ranks.
    """
    for first, second in pairwise(zip(*ops_by_rank, strict=True)):
        if first[0].signature != second[0].signature or first[0].name or first[0].kind in ROOTED:
            continue
        left = [rank for rank, ops in enumerate(zip(first, second, strict=True)) if not known & {op.site for op in ops}]
        stayed = [rank for rank, ops in enumerate(zip(first, second, strict=True)) if known >= {op.site for op in ops}]
        if left and stayed and len(left) + len(stayed) == len(first):
            return CallMismatch(first, tuple(left))
    return None


def _mismatch(ops_by_rank: Sequence[Sequence[Op]], labels: Sequence[tuple[tuple[str, ...], ...]]) -> CallMismatch:
    (common, votes), *_ = Counter(labels).most_common()
    at = next(i for i in range(max(map(len, labels))) if len({row[i : i + 1] for row in labels}) > 1)
    calls = tuple(ops[at] if at < len(ops) else None for ops in ops_by_rank)
    has_majority = 2 * votes > len(labels)
    return CallMismatch(calls, tuple(r for r, row in enumerate(labels) if row != common) if has_majority else ())


def _call(op: Op | None) -> str:
    if op is None:
        return "no further collective"
    name = f" '{op.name}'" if op.name else ""
    return f"{op.kind}{name} {op.shape} {op.dtype}".rstrip() + (f" at {op.site}" if op.site else "")
