"""The sentences of a diagnosis. They list ranks, collectives and source lines, and the action of each party.

The cause is first.
"""

import signal
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from paceline.guard.deaths import MISMATCH_ERROR_PATTERN, RankEndKind
from paceline.guard.waits import FROZEN_PROCESS_STATES, OpMismatch, RankState, group_ranks_by_waits, op_stream_key
from paceline.protocol.code_locations import (
    call_site_frames,
    format_file_and_line,
    format_library,
    format_rank_location,
    is_stack_in_op,
    main_thread_frames,
)
from paceline.protocol.evidence import BLOCK_PREFIX, Diagnosis, DiagnosisKind, Evidence, LoaderWorker, Op, Phase
from paceline.runs.console import join_ranges

OPS_WITH_SOURCE = ("recv", "irecv", "broadcast", "scatter")
ENDED_PROCESS_STATES = ("", "Z", "X")  # states of a process that has ended
BUSY_CPU_SECONDS = 0.2  # per second
PROCESS_STATE_TEXTS = {
    "D": "D (in the kernel: a disk or file system that does not answer?)",
    "T": "T (stopped by a signal)",
    "t": "t (stopped by a debugger)",
}


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks: "rank 2" or "ranks 0, 1, 3-7"."""
    ranks = set(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {join_ranges(map(str, sorted(ranks)))}"


def format_subject_verb(ranks: Iterable[int], singular: str, plural: str) -> str:
    """A subject and its verb: `format_subject_verb([2], "waits", "wait")` is "rank 2 waits"."""
    ranks = set(ranks)
    return f"{format_ranks(ranks)} {singular if len(ranks) == 1 else plural}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def format_op(op: Op) -> str:
    """Format an operation: "all_reduce #9876 'bucket 3' [1732] float32"; a message with its peer."""
    peer = "" if op.peer is None else f" {'from' if op.kind in OPS_WITH_SOURCE else 'to'} rank {op.peer}"
    parts = (f"{op.kind}{peer}", f"#{op.seq}" if op.seq else "", f"'{op.name}'" if op.name else "", op.shape, op.dtype)
    return " ".join(part for part in parts if part)


def format_caller(op: Op) -> str:
    return f", called from {op.site}" if op.site else ""


def format_rank_state(evidence: Evidence) -> str:
    """The location of a rank as the end of "it is ...": "in load_batch at train.py:88, phase data, state S"."""
    parts = [_source_line(evidence)]
    if evidence.phase is not Phase.USER:
        parts.append(f"phase {evidence.phase.word}" if parts[0] else f"in {evidence.phase.word}")
    if evidence.state:
        busy = ", computing" if evidence.state == "R" and evidence.cpu_seconds > BUSY_CPU_SECONDS else ""
        parts.append(f"state {PROCESS_STATE_TEXTS.get(evidence.state, evidence.state)}{busy}")
    if not evidence.answered and evidence.code is None and evidence.state not in ("T", "t", ""):
        reason = "holds the interpreter lock (native code?)" if evidence.native else "frozen, or stuck in native code?"
        parts.append(f"does not answer: {reason}")
    return ", ".join(part for part in parts if part) or "at an unknown line"


def _source_line(evidence: Evidence) -> str:
    frame, library = call_site_frames(main_thread_frames(evidence))
    if frame is None:
        return ""
    at = f"at {format_file_and_line(frame)}{format_library(library)}"
    return at if frame.function in ("", "<module>") else f"in {frame.function} {at}"


def format_loader_worker(loader: LoaderWorker) -> str:
    subject = f"loader process {loader.number} (pid {loader.pid})"
    item = f"sample {loader.item} of epoch {loader.epoch}"
    if loader.state in ENDED_PROCESS_STATES:
        return f"{subject} has ended; it was loading {item}"
    stopped = f", state {loader.state}: stopped" if loader.state in FROZEN_PROCESS_STATES else f", state {loader.state}"
    return f"{subject} {'is loading' if loader.busy else 'has loaded'} {item}{stopped}"


MAX_EACH, MAX_OUTPUT_CHARS = 5, 100  # MAX_EACH: sentences about one party
RankStates = Mapping[int, RankState]


def make_diagnosis(
    kind: DiagnosisKind, ranks: RankStates, lines: Sequence[str], *, causes: Sequence[int] = (),
    tie: Sequence[Sequence[int]] = (), op: Op | None = None, at: str = "",
) -> Diagnosis:  # fmt: skip
    """A complete diagnosis. `at` is the line of the first rank in `causes`; by default its current line."""
    involved = [*causes, *(n for party in tie for n in party)]
    if any(op.name.startswith(BLOCK_PREFIX) for n in involved for op in ranks[n].evidence.ops[-1:]):
        rule = "with fsdp each call of a block is a collective: all ranks must call the same blocks in the same order"
        lines = [*lines, rule]
    step = max((rank.evidence.step for rank in ranks.values()), default=0)
    first = ranks[causes[0]].evidence if causes else None
    site = "" if first is None else at or format_rank_location(first) or (first.ops[-1].site if first.ops else "")
    parties = tuple(sorted(tuple(sorted(party)) for party in tie))
    return Diagnosis(kind, tuple(causes), parties, tuple(lines), op, site, step)


def find_stuck_loader_workers(evidence: Evidence) -> list[LoaderWorker]:
    if evidence.phase not in (Phase.DATA, Phase.USER):
        return []
    states = (*ENDED_PROCESS_STATES, *FROZEN_PROCESS_STATES, "D")
    stopped = [loader for loader in evidence.loaders if loader.state in states]
    return stopped or [loader for loader in evidence.loaders if loader.busy]


def describe_ranks_waited_for(ranks: RankStates, causes: Sequence[int]) -> list[str]:
    op, holders = most_awaited_op(ranks, causes), group_ranks_by_waits(ranks)
    alike = _group_ranks(causes, lambda n: (_where(ranks[n]), _most_awaited(holders, [n])))
    lines = [_not_entered(ranks, group, op) for group in alike]
    running = [ranks[n].evidence for n in causes if ranks[n].end is RankEndKind.RUNS and not ranks[n].frozen]
    loaders = [
        f"its {format_loader_worker(loader)}"
        for evidence in running
        for loader in find_stuck_loader_workers(evidence)[:2]
    ]
    findings = (finding for n in causes for finding in ranks[n].evidence.findings)
    threads = [finding.text for finding in findings if finding.kind == "thread"]
    return [*_limited(lines), *_limited(loaders + threads), *_waiting(ranks, op, without=causes)]


def _not_entered(ranks: RankStates, group: Sequence[int], op: Op | None) -> str:
    first = ranks[group[0]]
    missed = most_awaited_op(ranks, group[:1])
    pending_keys = [op_stream_key(pending, group[0]) for pending in first.pending]
    is_inside = missed is not None and op_stream_key(missed, group[0]) in pending_keys
    if first.frozen and is_inside:
        begins = f"{format_subject_verb(group, 'is', 'are')} in {format_op(missed or op or first.pending[0])}"
    elif missed is not None and missed.is_message:
        half = "send to" if "recv" in missed.kind else "receive from"
        waiter = next(n for n, other in ranks.items() if other.waits_for.get(group[0]) == missed)
        begins = f"{format_ranks(group)} did not {half} rank {waiter}, which waits for it"
    elif missed is not None:
        title = max((rank.evidence.titles.get(missed.group, "") for rank in ranks.values()), default="")
        begins = f"{format_ranks(group)} did not enter {format_op(missed)}{title and f' ({title})'}"
    else:
        begins = f"{format_subject_verb(group, 'has', 'have')} not reached the operation of the others"
    return f"{begins}; {'they' if len(group) > 1 else 'it'} {_where(first, many=len(group) > 1)}"


def _where(rank: RankState, *, many: bool = False) -> str:
    if rank.end is RankEndKind.LEFT:
        steps = f" at step {rank.evidence.step}" if rank.evidence.step else ""
        return f"ended{steps} with code {rank.evidence.code}"
    if rank.end is not RankEndKind.RUNS:
        return _ended(rank.evidence)
    return f"{'are' if many else 'is'} {format_rank_state(rank.evidence)}"


def _waiting(ranks: RankStates, op: Op | None, *, without: Collection[int]) -> list[str]:
    waiting = {n for n, rank in ranks.items() if rank.pending or rank.waits_for}.difference(without)
    lines: list[str] = []
    groups = _group_ranks(waiting, lambda n: _position(ranks[n], n))
    for group in sorted(groups, key=lambda group: (-len(group), group)):
        first = ranks[group[0]]
        held_op = _current_blocking_op(first)
        if held_op is None:
            at = format_rank_location(first.evidence) or "an unknown line"
            lines.append(f"{format_subject_verb(group, 'waits', 'wait')} at {at}")
            continue
        is_same = op is not None and (op_stream_key(op, -1), op.seq) == (op_stream_key(held_op, -1), held_op.seq)
        op_text = "it" if is_same else format_op(held_op)
        lines.append(f"{format_subject_verb(group, 'waits', 'wait')} in {op_text}{format_caller(_usual(ranks, group))}")
    return _limited(lines)


def _position(rank: RankState, number: int) -> Hashable:
    held_op = _current_blocking_op(rank)
    return format_rank_location(rank.evidence) if held_op is None else (op_stream_key(held_op, number), held_op.seq)


def _current_blocking_op(rank: RankState) -> Op | None:
    if not rank.waits_for:
        return rank.pending[-1] if rank.pending else None
    return find_blocking_op(rank, rank.waits_for)


def _usual(ranks: RankStates, group: Sequence[int]) -> Op:
    ops = [op for n in group if (op := _current_blocking_op(ranks[n])) is not None]
    usual = Counter(op.site for op in ops).most_common(1)[0][0]
    return next(op for op in ops if op.site == usual)


def find_blocking_op(rank: RankState, others: Collection[int]) -> Op | None:
    """The operation in which a rank waits for some of `others`: the one on its stack, else the first one started."""
    few, many = (rank.waits_for, others) if len(rank.waits_for) < len(others) else (others, rank.waits_for)
    ops = [op for op in rank.pending if any(n in many and rank.waits_for[n] == op for n in few)]
    return next((op for op in ops if is_stack_in_op(rank.evidence, op)), ops[0] if ops else None)


def most_awaited_op(ranks: RankStates, causes: Collection[int]) -> Op | None:
    return _most_awaited(group_ranks_by_waits(ranks), causes)


def _most_awaited(holders: Iterable[tuple[Mapping[int, Op | None], list[int]]], causes: Collection[int]) -> Op | None:
    counts: Counter[tuple[str, int, str, int | None]] = Counter()
    ops: dict[tuple[str, int, str, int | None], Op] = {}
    for waits_for, waiting in holders:
        for n in causes:
            if (op := waits_for.get(n)) is not None:
                counts[key := (op.group, op.seq, op.kind, op.peer)] += len(waiting)
                ops.setdefault(key, op)
    return ops[counts.most_common(1)[0][0]] if counts else None


def describe_early_ends(ranks: RankStates, waiting: Sequence[int], left: Sequence[int]) -> list[str]:
    op = most_awaited_op(ranks, left)
    op_text = "for others" if op is None else f"in {format_op(op)}{format_caller(op)}"
    return [
        f"{format_subject_verb(waiting, 'waits', 'wait')} {op_text}",
        f"{format_ranks(left)} ended without it, with code 0",
    ]


def describe_mismatch(calls: OpMismatch, causes: Collection[int]) -> list[str]:
    ordered = sorted(calls.parties, key=lambda party: (not any(n in party for n in causes), len(party), min(party)))
    ops = [(format_ranks(party), next(iter(party.values()))) for party in ordered]
    return _limited([f"{subject} called {format_op(op)}{op.site and f' at {op.site}'}" for subject, op in ops])


def describe_cycle(ranks: RankStates, parties: Sequence[Sequence[int]], ops: Mapping[int, Op]) -> list[str]:
    members = {n for party in parties for n in party}
    lines: list[str] = []
    for party in parties:
        op = ops.get(party[0])
        distinct = {id(ranks[n].waits_for): ranks[n].waits_for for n in party}
        others = {o for waits_for in distinct.values() for o in waits_for} & (members - set(party))
        if op is None or not others:
            lines.append(f"{format_subject_verb(party, 'is', 'are')} {format_rank_state(ranks[party[0]].evidence)}")
            continue
        group_text = "" if op.is_message else f" of group {op.group}"
        op_text = f"{format_op(op)}{group_text}{format_caller(op)}"
        lines.append(f"{format_subject_verb(party, 'waits', 'wait')} for {format_ranks(others)} in {op_text}")
    return _limited(lines)


def describe_stuck_op(ranks: RankStates, pending: Mapping[int, Op]) -> list[str]:
    op = next(iter(pending.values()))
    completed = [n for n in ranks if n not in pending]
    lines = [
        f"{format_subject_verb(pending, 'is', 'are')} in {format_op(op)}{format_caller(op)}; no rank is missing in it"
    ]
    if completed:
        lines.append(f"{format_subject_verb(completed, 'has', 'have')} completed it")
    hosts: dict[str, list[int]] = {}
    for n in pending:
        hosts.setdefault(ranks[n].evidence.host, []).append(n)
    if len({rank.evidence.host for rank in ranks.values()}) > 1:
        between = "; ".join(f"{host}: {format_ranks(numbers)}" for host, numbers in sorted(hosts.items())[:8])
        lines.append(f"the network between these nodes does not transfer the data: {between}")
    return lines


def describe_stuck_ranks(ranks: RankStates, causes: Sequence[int], op: Op) -> list[str]:
    lines = [
        f"{format_ranks([n])} is in {format_op(op)}, as all are; it is {format_rank_state(ranks[n].evidence)}"
        for n in causes
    ]
    return [*_limited(lines), *_waiting(ranks, op, without=causes)]


def describe_failures(ranks: RankStates, causes: Sequence[int]) -> list[str]:
    return _limited([f"rank {n} {_ended(ranks[n].evidence)}{_last(ranks[n].evidence)}" for n in causes])


def describe_transport_failures(ranks: RankStates, causes: Sequence[int]) -> list[str]:
    lines = describe_failures(ranks, causes)
    if any(MISMATCH_ERROR_PATTERN.search(ranks[n].evidence.error_text) for n in causes):
        lines.append("it and another rank have entered different operations; either may be wrong")
    return lines


def describe_parameter_count(party: Mapping[int, int]) -> str:
    owner = "their models have" if len(party) > 1 else "its model has"
    return f"{format_ranks(party)}: {owner} {min(party.values())} parameters"


def _ended(evidence: Evidence) -> str:
    if evidence.lost_reason:
        return f"was lost with its node, {evidence.host}"
    last_line = next((line.strip() for line in reversed(evidence.error_text.splitlines()) if line.strip()), "")
    output = f": {last_line[:MAX_OUTPUT_CHARS]}" if last_line else ""
    if evidence.code is None:
        return f"is ending{output}"
    if evidence.code >= 0:
        return f"ended with exit code {evidence.code}{output}"
    return f"was killed by {signal_name(-evidence.code)}"


def _last(evidence: Evidence) -> str:
    if not evidence.ops:
        return ""
    last = evidence.ops[-1]
    return f"; its last call was {format_op(last)}{last.site and f' at {last.site}'}"


def describe_locations(ranks: RankStates) -> list[str]:
    groups = sorted(_group_ranks(ranks, lambda n: _where(ranks[n])), key=lambda group: (len(group), group))
    lines = [f"{format_ranks(group)} {_where(ranks[group[0]], many=len(group) > 1)}" for group in groups]
    return _limited(lines, 10)


def _group_ranks(numbers: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for n in numbers:
        groups.setdefault(key(n), []).append(n)
    return list(groups.values())


def _limited(lines: list[str], cap: int = MAX_EACH) -> list[str]:
    return lines if len(lines) <= cap else [*lines[: cap - 1], f"... and {len(lines) - cap + 1} more of this kind"]
