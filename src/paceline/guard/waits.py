"""Builds the graph of waiting ranks, and finds operations that mismatch.

In a collective, a rank waits for the members of its group that have called fewer of the group's collectives. In a
message, it waits for its peer until the peer has called the matching operation. The last operations of a rank show its
calls.

    group of 0, 1, 2      rank 0: #5 in flight     rank 1: #4 done     rank 2: #5 in flight
    edges                 0 -> 1                   none                2 -> 1            so all wait for rank 1

A rank may have called several collectives without waiting (#5 to #8, the buckets of a backward). It waits for each rank
that has not called all of them.
"""

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeVar

from paceline.guard.deaths import RankEndKind, classify_rank_end_with_ops
from paceline.protocol.code_locations import is_stack_in_op, is_waiting_for_ranks
from paceline.protocol.evidence import Evidence, Op, Phase

# operations numbered together: a group's collectives, messages from -> to
OpStreamKey = tuple[str, tuple[int, int] | None]
MessageKey = tuple[OpStreamKey, int, str, str]
FROZEN_PROCESS_STATES = ("T", "t")
WORLD_GROUP = "0"  # torch's name of the group of all ranks
ANY_SOURCE = -1


T = TypeVar("T")


@dataclass(frozen=True)
class RankState:
    evidence: Evidence
    end: RankEndKind
    pending: tuple[Op, ...] = ()  # operations that it has called and may wait for
    waits_for: Mapping[int, Op | None] = field(default_factory=dict[int, "Op | None"])
    """Maps each awaited rank to the operation that it has not called; to None if only the stack shows the wait."""

    @property
    def frozen(self) -> bool:
        return self.end is RankEndKind.RUNS and self.evidence.state in FROZEN_PROCESS_STATES


def op_stream_key(op: Op, rank: int) -> OpStreamKey:
    """The stream in which `op`, called by `rank`, is numbered."""
    if not op.is_message:
        return op.group, None
    peer = ANY_SOURCE if op.peer is None else op.peer
    return op.group, ((peer, rank) if "recv" in op.kind else (rank, peer))


def _members(evidence: Sequence[Evidence]) -> dict[str, frozenset[int]]:
    """The ranks of each group; if no running rank knows a group, the ranks that have used it."""
    used: dict[str, set[int]] = {}
    for sample in evidence:
        for op in sample.ops:
            used.setdefault(op.group, set()).add(sample.rank)
    world = frozenset(sample.rank for sample in evidence)
    members = {group: frozenset(ranks) for group, ranks in used.items()}
    members[WORLD_GROUP] = world
    reported: dict[str, tuple[int, ...]] = {}
    for sample in evidence:
        for group, ranks in sample.groups.items():
            if reported.get(group) != ranks and (not ranks or sample.rank in ranks):
                reported[group], members[group] = ranks, frozenset(ranks or world) & world
    return members


def build_wait_for_graph(evidence: Sequence[Evidence]) -> dict[int, RankState]:
    """All ranks with the edges between them.

    Ranks that wait in the same operation have one mapping: of 8,000 ranks, half may wait for the other half.
    """
    groups, world = _members(evidence), {sample.rank for sample in evidence}
    called: dict[tuple[int, OpStreamKey], int] = {}
    arrived: set[MessageKey] = set()
    for sample in evidence:
        for op in sample.ops:
            key = sample.rank, op_stream_key(op, sample.rank)
            called[key] = max(called.get(key, 0), op.seq)
            if op.done and "recv" in op.kind:
                arrived.add(_message(op, sample.rank))
    ranks = {sample.rank: _without_edges(sample, arrived) for sample in evidence}
    frozen: dict[tuple[OpStreamKey, int], set[int]] = {}  # frozen ranks in an operation, which cannot complete it
    for n, rank in ranks.items():
        for op in rank.pending if rank.frozen else ():
            frozen.setdefault((op_stream_key(op, n), op.seq), set()).add(n)

    @cache
    def missing(key: OpStreamKey, seq: int, peer: int | None) -> set[int]:
        others = groups[key[0]] if peer is None else {peer}  # the group includes the caller, which has called it
        return {n for n in others & world if called.get((n, key), 0) < seq}

    @cache
    def edges(pending: tuple[Op, ...], caller: int | None, is_frozen: bool) -> Mapping[int, Op | None]:
        awaited: dict[int, Op | None] = {}
        for op in reversed(pending):  # reversed, so that the earliest overrides later ones
            key = op_stream_key(op, -1 if caller is None else caller)
            awaited |= dict.fromkeys(missing(key, op.seq, op.peer if op.is_message else None), op)
            awaited |= dict.fromkeys(() if is_frozen else frozen.get((key, op.seq), ()), op)
        return awaited

    for n, rank in ranks.items():
        caller = n if any(op.is_message for op in rank.pending) else None
        ranks[n] = replace(rank, waits_for=edges(rank.pending, caller, rank.frozen))
    return _with_unknown(ranks)


def _without_edges(evidence: Evidence, arrived: Container[MessageKey]) -> RankState:
    end = classify_rank_end_with_ops(evidence)
    may_wait = not end.is_primary and end is not RankEndKind.LEFT
    return RankState(evidence, end, _pending(evidence, end, arrived) if may_wait else ())


def group_ranks_by_waits(ranks: Mapping[int, RankState]) -> list[tuple[Mapping[int, Op | None], list[int]]]:
    return group_ranks_by_edges({n: rank.waits_for for n, rank in ranks.items()})


def group_ranks_by_edges(edges: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """The ranks that share one object with their edges."""
    holders: dict[int, tuple[T, list[int]]] = {}
    for number, others in edges.items():
        holders.setdefault(id(others), (others, []))[1].append(number)
    return list(holders.values())


def _message(op: Op, rank: int) -> MessageKey:
    return op_stream_key(op, rank), op.seq, op.shape, op.dtype


def _pending(evidence: Evidence, end: RankEndKind, arrived: Container[MessageKey]) -> tuple[Op, ...]:
    """The operations in flight. If a rank did not answer, operations before a completed one of their stream are done.

    A message that has arrived is not in flight, even if the sender has not noticed that yet.
    """
    completed: set[OpStreamKey] = set()
    pending: list[Op] = []
    for op in reversed(evidence.ops):
        if op.done or (op.is_message and _message(op, evidence.rank) in arrived):
            completed.add(op_stream_key(op, evidence.rank))
        elif evidence.answered or op_stream_key(op, evidence.rank) not in completed:
            pending.append(op)
    if end is not RankEndKind.RUNS and not pending:  # an aborted collective may look as if it were done
        pending = list(evidence.ops[-1:])
    return tuple(reversed(pending))


def _with_unknown(ranks: Mapping[int, RankState]) -> dict[int, RankState]:
    """Add edges for ranks whose stack waits although no operation is in flight: to all ranks that do not wait.

    Before init_process_group, for example, there are no operations, and these are the only edges.
    """
    unknown = {n for n, rank in ranks.items() if not rank.pending and not rank.frozen and _waits_in_stack(rank)}
    free = {
        n for n, rank in ranks.items() if not rank.pending and n not in unknown and rank.end is not RankEndKind.VICTIM
    }
    edges: dict[int, Op | None] = dict.fromkeys(free)
    return {n: replace(rank, waits_for=edges) if n in unknown else rank for n, rank in ranks.items()}


def _waits_in_stack(rank: RankState) -> bool:
    if rank.end is not RankEndKind.RUNS:
        return False
    waits = is_waiting_for_ranks(rank.evidence)
    return bool(waits) or (waits is None and rank.evidence.phase is Phase.SYNC)


def drop_abandoned_messages(ranks: Mapping[int, RankState]) -> dict[int, RankState]:
    """Remove the messages that a rank has started, if it is now in different code of the script."""
    kept = dict(ranks)
    for n, rank in ranks.items():
        messages = [op for op in rank.pending if op.is_message]
        if messages and is_outside_ops(rank):
            pending = tuple(op for op in rank.pending if op not in messages)
            edges = {other: op for other, op in rank.waits_for.items() if op not in messages}
            kept[n] = replace(rank, pending=pending, waits_for=edges)
    return kept


def is_outside_ops(rank: RankState) -> bool:
    """Whether the rank is in code of the script, outside of its operations. `work.wait()` looks the same."""
    outside = is_waiting_for_ranks(rank.evidence) is False
    return outside and not any(is_stack_in_op(rank.evidence, op) for op in rank.pending)


def reachable_ranks(start: Iterable[int], edges: Mapping[int, Iterable[int]]) -> set[int]:
    visited, todo = set(start), list(start)
    followed: set[int] = set()  # many ranks share one set of edges
    while todo:
        others = edges.get(todo.pop(), ())
        if id(others) in followed:
            continue
        followed.add(id(others))
        for other in others:
            if other not in visited:
                visited.add(other)
                todo.append(other)
    return visited


def group_ranks_by_key(values: Mapping[int, T], key: Callable[[T], Hashable]) -> tuple[Mapping[int, T], ...]:
    """Group ranks by key, the largest party first; equally large ones by their lowest rank."""
    parties: dict[Hashable, dict[int, T]] = {}
    for number, value in sorted(values.items(), key=lambda pair: pair[0]):
        parties.setdefault(key(value), {})[number] = value
    return tuple(sorted(parties.values(), key=lambda party: (-len(party), min(party))))


def majority_party(parties: Sequence[Mapping[int, T]]) -> Mapping[int, T] | None:
    total = sum(map(len, parties))
    return next((party for party in parties if 2 * len(party) > total), None)


def ranks_outside_majority(parties: Sequence[Mapping[int, T]]) -> tuple[int, ...]:
    right = majority_party(parties)
    return () if right is None else tuple(sorted(n for party in parties if party is not right for n in party))


RAGGED_COLLECTIVES = frozenset({"all_gather", "gather", "scatter", "all_to_all", "all_to_all_single", "reduce_scatter"})
"""Collectives to which ranks may pass different shapes."""


@dataclass(frozen=True)
class OpMismatch:
    sequence_key: OpStreamKey
    seq: int
    parties: tuple[Mapping[int, Op], ...]  # rank -> its operation; the largest party first


def find_mismatches(ranks: Mapping[int, RankState]) -> list[OpMismatch]:
    """The mismatches between collectives and between messages that did not complete, the earliest first.

    An operation that all ranks have completed does not count, even if it looks different.
    """
    entered: dict[tuple[OpStreamKey, int], dict[int, Op]] = {}
    for number, rank in ranks.items():
        for op in rank.evidence.ops:
            entered.setdefault((op_stream_key(op, number), op.seq), {})[number] = op
    mismatches: list[OpMismatch] = []
    for (op_stream, seq), ops in entered.items():
        if len(ops) < 2 or all(op.done for op in ops.values()):
            continue
        parties = split_by_signature(ops)
        if len(parties) > 1:
            mismatches.append(OpMismatch(op_stream, seq, parties))
    return sorted(mismatches, key=lambda mismatch: (mismatch.seq, str(mismatch.sequence_key)))


def split_by_signature(ops: Mapping[int, Op], *, by_name: bool = True) -> tuple[Mapping[int, Op], ...]:
    """Split by the fields that must be equal. Fields that one of the operations does not have are ignored."""
    is_message = any(op.is_message for op in ops.values())
    kinds = {"" if is_message else op.kind for op in ops.values()}
    fields = ["name"] if is_message else ["kind", "name", "peer"]
    if len(kinds) == 1 and not kinds & RAGGED_COLLECTIVES:
        fields += ["shape", "dtype"]
    if not by_name:
        fields.remove("name")
    common_fields = [field for field in fields if all(getattr(op, field) not in ("", None) for op in ops.values())]
    return group_ranks_by_key(ops, lambda op: tuple(getattr(op, field) for field in common_fields))
