"""Finds the ranks that caused a failure or a stall. Without I/O: from the evidence of all ranks to one diagnosis.

The most certain explanation counts, in this order:

    primary failures                     DIED: a signal or an exception. A rank that only lost its peers is not a
                                         primary failure (see deaths.py)
    ranks that contradict each other     MISMATCH, LEFT, DEADLOCK: one of them is wrong (see `_diagnose_dispute`)
    ranks that others wait for and that  STOPPED, UNINTERRUPTIBLE, LOADER, BEHIND, NOT_MET, by the state of the process
    wait for no rank
    all ranks are in one collective      NETWORK
    and it does not complete
    no rank waits for a rank             BEHIND, NOT_MET: the ranks that are not where the majority is

If the evidence does not show which party is wrong, the diagnosis lists the parties and names no rank as the cause. If
two ranks disagree, either may be right. The diagnosis does not depend on clocks: sequence numbers order collectives,
and ages order failures.

Ranks contradict each other in three cases: they have entered different operations under the same number, they wait for
each other, or a rank has ended while others wait for it. All ranks run one program. If two ranks both follow it, one is
ahead of the other, or both are at the same place. They cannot wait for each other, and ranks that follow the program
cannot form a cycle. Therefore, if one rank is wrong, it is in every cycle, and without it no cycle remains. If several
ranks are wrong, the majority is right.

    0, 2 wait for 1, and 1 waits for 0, 2     cycles 0-1 and 2-1: only 1 is in both, it is wrong
    0 waits for 1, and 1 for 0                one cycle: 0 or 1 is wrong, and nothing shows which
"""

import signal
from collections.abc import Collection, Hashable, Mapping, Sequence

from msgspec.structs import replace

from paceline.guard import sentences, waits
from paceline.guard.deaths import RankEndKind, classify_rank_end, first_to_fail, parameter_counts_by_rank
from paceline.guard.sentences import make_diagnosis
from paceline.guard.waits import OpMismatch, RankState, group_ranks_by_key, majority_party, ranks_outside_majority
from paceline.protocol.code_locations import format_rank_location, is_stack_in_op, is_waiting_for_ranks
from paceline.protocol.evidence import SHARED_GROUP, Diagnosis, DiagnosisKind, Evidence, Op, Phase, RankSample

RankStates = Mapping[int, RankState]
WaitGraph = Mapping[int, frozenset[int]]  # rank -> the ranks for which it waits
KINDS_PREFERRED_TO_VICTIMS = (
    DiagnosisKind.MISMATCH,
    DiagnosisKind.DEADLOCK,
    DiagnosisKind.BEHIND,
    DiagnosisKind.STOPPED,
    DiagnosisKind.UNINTERRUPTIBLE,
    DiagnosisKind.LOADER,
)
DEADLOCK_SECONDS = 2.0  # without progress, before ranks count as deadlocked
IDLE_CPU_SECONDS = 0.5  # per second; a rank that uses more may still arrive


def diagnose(evidence: Sequence[Evidence]) -> Diagnosis:
    ranks = waits.build_wait_for_graph(evidence)
    mismatches = waits.find_mismatches(ranks)
    engaged = waits.drop_abandoned_messages(ranks)
    diagnosis = (
        _diagnose_failures(ranks, mismatches)
        or _diagnose_dispute(engaged, mismatches)
        or _diagnose_waits(ranks, engaged)
        or _diagnose_dispute(ranks, mismatches)
        or _diagnose_stuck_collective(ranks)
        or _diagnose_without_waits(ranks)
    )
    first = first_to_fail(evidence)
    if first is None or _explains(diagnosis, first, evidence):
        return diagnosis
    outvoted = diagnosis.kind is DiagnosisKind.MISMATCH and classify_rank_end(first).is_primary and diagnosis.causes
    return replace(diagnosis, failed=diagnosis.causes[0] if outvoted else first.rank)  # all raise at the same time


def diagnose_first_failure(samples: Sequence[RankSample]) -> Diagnosis:
    first = first_to_fail(samples)
    if first is None:
        return Diagnosis(DiagnosisKind.UNKNOWN)
    causes = (first.rank,) if classify_rank_end(first).is_primary else ()
    return Diagnosis(DiagnosisKind.DIED, causes, failed=first.rank)


def _explains(diagnosis: Diagnosis, first: RankSample, evidence: Sequence[Evidence]) -> bool:
    aborted = classify_rank_end(first) is RankEndKind.SIGNAL and first.code == -signal.SIGABRT
    has_evidence = any(sample.state or sample.ops for sample in evidence)  # else only samples
    if not has_evidence or not (aborted or classify_rank_end(first) is RankEndKind.VICTIM):
        return False
    better = diagnosis.kind in KINDS_PREFERRED_TO_VICTIMS or (aborted and diagnosis.kind is DiagnosisKind.LEFT)
    return better and bool(diagnosis.causes or diagnosis.tie)


def _diagnose_failures(ranks: RankStates, mismatches: Sequence[OpMismatch]) -> Diagnosis | None:
    died = [n for n, rank in ranks.items() if rank.end.is_primary]
    died.sort(key=lambda n: (ranks[n].end, ranks[n].evidence.failed_at_seconds, n))
    broken = [n for n, rank in ranks.items() if rank.end is RankEndKind.BROKEN]
    counts = parameter_counts_by_rank([ranks[n].evidence for n in died])
    if 1 < len(counts) == len(died):  # each rank reports a different model on another rank
        parties = group_ranks_by_key(counts, lambda count: count)
        right = majority_party(parties)
        wrong = [n for n in died if right is not None and n not in right]
        lines = [*map(sentences.describe_parameter_count, parties if right is None else reversed(parties))]
        tie = [] if right is not None else [list(party) for party in parties]
        return make_diagnosis(DiagnosisKind.MISMATCH, ranks, lines, causes=wrong, tie=tie)
    if died:
        return make_diagnosis(DiagnosisKind.DIED, ranks, sentences.describe_failures(ranks, died), causes=died)
    if not broken or mismatches:  # a rank that its transport ended may be the correct one
        return None
    causes = [n for n in broken if not ranks[n].evidence.error_text]  # their output mentions no other rank
    lines = sentences.describe_transport_failures(ranks, broken)
    return make_diagnosis(DiagnosisKind.DIED, ranks, lines, causes=causes)


def _diagnose_waits(ranks: RankStates, engaged: RankStates) -> Diagnosis | None:
    waiting = [n for n, rank in engaged.items() if rank.waits_for]
    reached = sorted(waits.reachable_ranks(waiting, {n: rank.waits_for for n, rank in engaged.items()}))
    causes = [n for n in reached if _is_free(ranks[n])] or [n for n, rank in ranks.items() if rank.frozen]
    if not causes:
        return None
    kinds = {n: _kind(ranks[n]) for n in causes}
    kind = min(kinds.values())
    if kind is DiagnosisKind.BEHIND and not any(rank.evidence.ops for rank in ranks.values()):
        kind = DiagnosisKind.NOT_MET
    causes.sort(key=lambda n: (kinds[n], n))
    op = sentences.most_awaited_op(ranks, causes)
    return make_diagnosis(kind, ranks, sentences.describe_ranks_waited_for(ranks, causes), causes=causes, op=op)


def _is_free(rank: RankState) -> bool:
    """Whether it waits for no rank. A rank that has answered and has an operation in flight may be in `work.wait()`."""
    if rank.frozen:
        return True
    if rank.waits_for or rank.end is not RankEndKind.RUNS:
        return False
    return not rank.pending or (not rank.evidence.answered and waits.is_outside_ops(rank))


def _kind(rank: RankState) -> DiagnosisKind:
    if rank.frozen:
        return DiagnosisKind.STOPPED
    if rank.evidence.state == "D":
        return DiagnosisKind.UNINTERRUPTIBLE
    return DiagnosisKind.LOADER if sentences.find_stuck_loader_workers(rank.evidence) else DiagnosisKind.BEHIND


def _diagnose_stuck_collective(ranks: RankStates) -> Diagnosis | None:
    inside = {n: r.pending[0] for n, r in ranks.items() if r.pending and not r.waits_for and not r.frozen}
    if not any(ranks[n].end is RankEndKind.RUNS for n in inside):  # ended ranks do not show which rank was missing
        return None
    op = next(iter(group_ranks_by_key(inside, lambda op: (op.group, op.seq))[0].values()))
    in_kernel = [n for n in inside if ranks[n].evidence.state == "D"]
    silent = [n for n in inside if not ranks[n].evidence.answered and ranks[n].end is RankEndKind.RUNS]
    others = [rank for n, rank in ranks.items() if n not in silent and rank.end is RankEndKind.RUNS]
    if in_kernel:
        kind, causes = DiagnosisKind.UNINTERRUPTIBLE, in_kernel
    elif silent and len(silent) < len(inside) and all(rank.evidence.answered for rank in others):
        kind, causes = DiagnosisKind.STOPPED, silent  # the processes of a frozen container do not show state T
    else:
        return make_diagnosis(DiagnosisKind.NETWORK, ranks, sentences.describe_stuck_op(ranks, inside), op=op)
    return make_diagnosis(kind, ranks, sentences.describe_stuck_ranks(ranks, causes, op), causes=causes, op=op)


def _diagnose_without_waits(ranks: RankStates) -> Diagnosis:
    running = {n: rank for n, rank in ranks.items() if rank.end is RankEndKind.RUNS}
    kinds = {n: _kind(rank) for n, rank in running.items()}
    stuck = [n for n, kind in kinds.items() if kind is not DiagnosisKind.BEHIND]
    lines = sentences.describe_locations(ranks)
    if stuck:
        lines = sentences.describe_ranks_waited_for(ranks, stuck)
        return make_diagnosis(min(kinds[n] for n in stuck), ranks, lines, causes=stuck)
    any_met = any(rank.evidence.ops for rank in ranks.values())
    kind = DiagnosisKind.BEHIND if any_met else DiagnosisKind.NOT_MET
    if len(ranks) == len(running) == 1:
        return make_diagnosis(DiagnosisKind.BEHIND, ranks, lines, causes=list(running))
    sites = {n: format_rank_location(rank.evidence) for n, rank in running.items()}
    parties = group_ranks_by_key({n: site for n, site in sites.items() if site}, lambda site: site)
    right = majority_party(parties)
    if right is None or len(right) == len(running):
        return make_diagnosis(DiagnosisKind.UNKNOWN, ranks, lines)
    wrong = [n for n in running if n not in right]
    return make_diagnosis(kind, ranks, lines, causes=wrong)


# ---- ranks that contradict each other ----


def _diagnose_dispute(ranks: RankStates, mismatches: Sequence[OpMismatch]) -> Diagnosis | None:
    graph = _graph(ranks, mismatches)
    if not _find_cycle(graph):
        return None
    # a training that reports its phases ends only in phase CLOSE
    in_steps = [n for n, rank in ranks.items() if rank.evidence.phase not in (Phase.USER, Phase.CLOSE)]
    early = [n for n in in_steps if ranks[n].end is RankEndKind.LEFT and graph[n]]
    # the ranks that are in every cycle; empty if several ranks are wrong
    suspects = early or [n for n in sorted(_find_cycle(graph)) if not _find_cycle(graph, without=n)]
    parties = _parties(ranks, mismatches, suspects, graph)
    if early or len(suspects) == 1:
        causes = suspects
    elif suspects:
        causes = []
    else:
        causes = [*ranks_outside_majority(parties)]
    tie = [] if causes else [sorted(party) for party in parties]
    return _dispute_diagnosis(ranks, mismatches, causes, tie, graph)


def _graph(ranks: RankStates, mismatches: Sequence[OpMismatch]) -> WaitGraph:
    """The edges between ranks. Ranks with equal edges use one set: of 8,000 ranks, half may contradict the others."""
    sources: dict[int, list[Collection[int]]] = {n: [rank.waits_for] for n, rank in ranks.items()}
    for mismatch in mismatches:
        for party in mismatch.parties:
            opponents = {n for other in mismatch.parties if other is not party for n in other}
            for n in party:
                sources[n].append(opponents)
    ended = {n for n, rank in ranks.items() if rank.end is RankEndKind.LEFT}
    for waits_for, waiters in waits.group_ranks_by_waits(ranks) if ended else ():
        for n in ended.intersection(waits_for):
            sources[n].append(waiters)  # no rank waits for a rank that ends as the program says
    graph: dict[tuple[int, ...], frozenset[int]] = {}
    for parts in sources.values():
        if (key := tuple(map(id, parts))) not in graph:
            graph[key] = frozenset().union(*parts)
    return {n: graph[tuple(map(id, parts))] for n, parts in sources.items()}


def _parties(
    ranks: RankStates, mismatches: Sequence[OpMismatch], suspects: Sequence[int], graph: WaitGraph
) -> Sequence[Mapping[int, object]]:
    if not suspects and mismatches:
        return mismatches[0].parties
    members = suspects or sorted(_cyclic_core(graph))
    return group_ranks_by_key({n: _position(ranks[n], n, members) for n in members}, lambda position: position)


def _position(rank: RankState, number: int, members: Sequence[int]) -> Hashable:
    if rank.end is RankEndKind.LEFT:
        return "ended"
    op = sentences.find_blocking_op(rank, members) or (rank.pending[-1] if rank.pending else None)
    return None if op is None else (waits.op_stream_key(op, number), op.seq, op.kind, op.name, op.shape, op.dtype)


def _dispute_diagnosis(
    ranks: RankStates,
    mismatches: Sequence[OpMismatch],
    causes: Sequence[int],
    tie: Sequence[Sequence[int]],
    graph: WaitGraph,
) -> Diagnosis:
    involved = [*causes, *(n for party in tie for n in party)]
    for mismatch in mismatches:
        count = sum(any(n in party for n in involved) for party in mismatch.parties)
        if count >= (1 if causes else 2):
            right = next((p for p in mismatch.parties if not any(n in p for n in causes)), mismatch.parties[0])
            op = next(iter(right.values()))
            site = next((party[n].site for n in causes for party in mismatch.parties if n in party), "")
            lines = sentences.describe_mismatch(mismatch, causes)
            return make_diagnosis(DiagnosisKind.MISMATCH, ranks, lines, causes=causes, tie=tie, op=op, at=site)
    involved_ended = [n for n in involved if ranks[n].end is RankEndKind.LEFT]
    if involved_ended:
        op = sentences.most_awaited_op(ranks, involved_ended)
        lines = sentences.describe_ranks_waited_for(ranks, involved_ended)
        return make_diagnosis(DiagnosisKind.LEFT, ranks, lines, causes=causes, tie=tie, op=op)
    awaited = {n for other in causes for n in ranks[other].waits_for}
    ended = [n for n in graph if ranks[n].end is RankEndKind.LEFT and n in awaited]
    if ended:
        op, lines = sentences.most_awaited_op(ranks, ended), sentences.describe_early_ends(ranks, causes, ended)
        return make_diagnosis(DiagnosisKind.MISMATCH, ranks, lines, causes=causes, op=op)
    groups = [list(party) for party in tie] or [list(causes), *_rivals(ranks, causes, graph)]
    members = [n for group in groups for n in group]
    ops = {n: op for n in members if (op := sentences.find_blocking_op(ranks[n], members)) is not None}
    op = ops.get(groups[-1][0])
    lines = sentences.describe_cycle(ranks, groups, ops)
    return make_diagnosis(DiagnosisKind.DEADLOCK, ranks, lines, causes=causes, tie=tie, op=op)


def _rivals(ranks: RankStates, causes: Sequence[int], graph: WaitGraph) -> list[list[int]]:
    wrong = set(causes)
    mutual = [n for n in graph if n not in wrong and any(n in graph[other] for other in wrong & graph[n])]
    rivals = mutual or [n for n in _find_cycle(graph) if n not in wrong]
    return [
        sorted(party)
        for party in group_ranks_by_key({n: _position(ranks[n], n, causes) for n in rivals}, lambda at: at)
    ]


def _find_cycle(graph: WaitGraph, *, without: int | None = None) -> set[int]:
    """The ranks of one cycle, if possible one of two ranks; empty if there is no cycle."""
    core = _cyclic_core(graph, without=without)
    for rank in sorted(core):
        for other in graph[rank]:
            if other in core and rank in graph[other]:
                return {rank, other}
    if not core:
        return set()
    path = [min(core)]  # each remaining rank waits for a remaining rank, so the path returns to itself
    while (following := min(other for other in graph[path[-1]] if other in core)) not in path:
        path.append(following)
    return set(path[path.index(following) :])


def _cyclic_core(graph: WaitGraph, *, without: int | None = None) -> set[int]:
    """The ranks that are in a cycle or wait for one: all that remain after removing ranks without edges repeatedly."""
    holders = waits.group_ranks_by_edges(graph)  # the ranks that share one set of edges are removed together
    waiters: dict[int, list[int]] = {}
    edge_counts = [0] * len(holders)
    removable = [] if without is None else [without]
    for index, (others, ranks) in enumerate(holders):
        awaited = [other for other in others if other != without and other in graph]
        edge_counts[index] = len(awaited)
        for other in awaited:
            waiters.setdefault(other, []).append(index)
        if not awaited:
            removable += ranks
    removed: set[int] = set()
    for rank in removable:  # the loop appends to this list
        for index in waiters.get(rank, ()) if rank not in removed else ():
            edge_counts[index] -= 1
            if edge_counts[index] == 0:
                removable += holders[index][1]
        removed.add(rank)
    return set(graph) - removed


# ---- collectives that can never complete ----


def is_deadlocked(evidence: Sequence[Evidence]) -> bool:
    """Whether ranks wait in collectives that can never complete.

    A late rank and a hanging rank look the same, so the guard waits for the window before it reports one. Two cases are
    certain before that:

    - Two ranks wait under the same number of the same group, and the operation, the shape, the type or the root differs
      (in shared memory also the name). The transport never pairs them.
    - Ranks wait for each other in a cycle: each of them waits in a collective that the next rank has not called.

    Each of these ranks must be inside its call, must have answered, and must have made no progress for
    DEADLOCK_SECONDS. Operations that a rank has started without waiting for them do not count. Messages between two
    ranks do not count.
    """
    ranks = waits.build_wait_for_graph(evidence)
    ops = {n: op for n, rank in ranks.items() if (op := _blocking_collective(rank)) is not None}
    if len(ops) < 2:
        return False
    mismatches = waits.find_mismatches(ranks)
    return any(_differ(mismatch, ops) for mismatch in mismatches) or bool(_find_cycle(_edges(ranks, ops)))


def _blocking_collective(rank: RankState) -> Op | None:
    sample, runs = rank.evidence, rank.end is RankEndKind.RUNS and not rank.frozen
    if not runs or not sample.answered or sample.still_seconds < DEADLOCK_SECONDS:
        return None
    if sample.cpu_seconds > IDLE_CPU_SECONDS or is_waiting_for_ranks(sample) is not True:
        return None
    on_stack = [op for op in rank.pending if not op.is_message and is_stack_in_op(sample, op)]
    return on_stack[-1] if on_stack else None


def _differ(mismatch: OpMismatch, blocking_ops: Mapping[int, Op]) -> bool:
    ops = {n: op for party in mismatch.parties for n, op in party.items() if blocking_ops.get(n) == op}
    is_shared = mismatch.sequence_key[0].startswith(SHARED_GROUP)
    return len(ops) > 1 and len(waits.split_by_signature(ops, by_name=is_shared)) > 1


def _edges(ranks: Mapping[int, RankState], ops: Mapping[int, Op]) -> Mapping[int, frozenset[int]]:
    shared: dict[tuple[int, Op], frozenset[int]] = {}
    for n, op in ops.items():
        waits_for = ranks[n].waits_for
        key = id(waits_for), op
        if key not in shared:
            shared[key] = frozenset(other for other, edge_op in waits_for.items() if edge_op == op and other in ops)
    return {n: shared[id(ranks[n].waits_for), op] for n, op in ops.items()}
