"""Judges who is to blame, for a failure as for a standstill. Pure: from what is known of each rank to one verdict.

The surest explanation counts, in this order:

    died by itself                       DIED: a signal, an exception; who only lost others has not (see deaths.py)
    are at odds                          MISMATCH, LEFT, DEADLOCK: one of them is wrong (see disputes.py)
    are waited for, and wait for nobody  STOPPED, UNINTERRUPTIBLE, LOADER, BEHIND, NOT_MET, by how they stand
    all are in, and nothing comes out    NETWORK
    nobody waits for anybody             BEHIND, NOT_MET: those that are elsewhere than the majority

Where nobody can say who is wrong, the parties are named and nobody is blamed: of two ranks that disagree either may be
right. No clocks are compared; what came first is told by the numbers of collectives, and of failures by their ages.
"""

import signal
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from paceline.contract.evidence import Evidence, Sample, Verdict, VerdictKind
from paceline.contract.places import shown_site
from paceline.guard import sentences
from paceline.guard.deaths import RankEnd, end_of, first_to_fail, parameters
from paceline.guard.disputes import dispute
from paceline.guard.odds import Odds, find_odds
from paceline.guard.sentences import conclude
from paceline.guard.waits import (
    Rank,
    majority,
    parties_by,
    reached,
    stands_outside,
    waiting_graph,
    without_loose_ends,
)

Ranks = Mapping[int, Rank]
BETTER_THAN_VICTIMS = (
    VerdictKind.MISMATCH,
    VerdictKind.DEADLOCK,
    VerdictKind.BEHIND,
    VerdictKind.STOPPED,
    VerdictKind.UNINTERRUPTIBLE,
    VerdictKind.LOADER,
)


def judge(evidence: Sequence[Evidence]) -> Verdict:
    """The verdict on ranks that stand still, or of which some have failed. Any evidence gives one."""
    ranks = waiting_graph(evidence)
    odds = find_odds(ranks)
    tied_up = without_loose_ends(ranks)
    verdict = (
        _died(ranks, odds)
        or dispute(tied_up, odds)
        or _waited_for(ranks, tied_up)
        or dispute(ranks, odds)
        or _inside(ranks)
        or _elsewhere(ranks)
    )
    first = first_to_fail(evidence)
    if first is None or _explains(verdict, first, evidence):
        return verdict
    outvoted = verdict.kind is VerdictKind.MISMATCH and end_of(first).by_itself and verdict.guilty
    return replace(verdict, failed=verdict.guilty[0] if outvoted else first.rank)  # all raise at once: who was first?


def judge_samples(samples: Sequence[Sample]) -> Verdict:
    """The verdict on ranks of which some have failed, where samples are all that is known: the first failure."""
    first = first_to_fail(samples)
    if first is None:
        return Verdict(VerdictKind.UNKNOWN)
    return Verdict(VerdictKind.DIED, (first.rank,) if end_of(first).by_itself else (), failed=first.rank)


def _explains(verdict: Verdict, first: Sample, evidence: Sequence[Evidence]) -> bool:
    """Whether the verdict says better than the first failure itself why the run has failed."""
    aborted = end_of(first) is RankEnd.SIGNAL and first.code == -signal.SIGABRT
    asked = any(one.state or one.ops for one in evidence)  # else samples are all there is
    if not asked or not (aborted or end_of(first) is RankEnd.VICTIM):
        return False
    better = verdict.kind in BETTER_THAN_VICTIMS or (aborted and verdict.kind is VerdictKind.LEFT)
    return better and bool(verdict.guilty or verdict.tie)


def _died(ranks: Ranks, odds: Sequence[Odds]) -> Verdict | None:
    died = [n for n, one in ranks.items() if one.end.by_itself]
    died.sort(key=lambda n: (ranks[n].end, ranks[n].evidence.failed_at_seconds, n))
    broken = [n for n, one in ranks.items() if one.end is RankEnd.BROKEN]
    counts = parameters([ranks[n].evidence for n in died])
    if 1 < len(counts) == len(died):  # each rank accuses another
        parties = parties_by(counts, lambda count: count)
        right = majority(parties)
        wrong = [n for n in died if right is not None and n not in right]
        lines = [sentences.model(party) for party in (parties if right is None else reversed(parties))]
        tie = [] if right is not None else [list(party) for party in parties]
        return conclude(VerdictKind.MISMATCH, ranks, lines, guilty=wrong, tie=tie)
    if died:
        return conclude(VerdictKind.DIED, ranks, sentences.died(ranks, died), guilty=died)
    if not broken or odds:  # who was broken off by its transport may be the innocent one
        return None
    accused = [n for n in broken if not ranks[n].evidence.words]  # no word of anybody else
    return conclude(VerdictKind.DIED, ranks, sentences.broken(ranks, broken), guilty=accused)


def _waited_for(ranks: Ranks, tied_up: Ranks) -> Verdict | None:
    waiting = [n for n, one in tied_up.items() if one.waits_for]
    heads = sorted(reached(waiting, {n: one.waits_for for n, one in tied_up.items()}))
    guilty = [n for n in heads if _is_free(ranks[n])] or [n for n, one in ranks.items() if one.frozen]
    if not guilty:
        return None
    kinds = {n: _kind(ranks[n]) for n in guilty}
    kind = min(kinds.values())
    if kind is VerdictKind.BEHIND and not any(one.evidence.ops for one in ranks.values()):
        kind = VerdictKind.NOT_MET
    guilty.sort(key=lambda n: (kinds[n], n))
    op = sentences.awaited(ranks, guilty)
    return conclude(kind, ranks, sentences.waited_for(ranks, guilty), guilty=guilty, op=op)


def _is_free(one: Rank) -> bool:
    """Whether it waits for no rank. Who has answered, and has something in flight, may be in `work.wait()`."""
    if one.frozen:
        return True
    if one.waits_for or one.end is not RankEnd.RUNS:
        return False
    return not one.pending or (not one.evidence.answered and stands_outside(one))


def _kind(one: Rank) -> VerdictKind:
    if one.frozen:
        return VerdictKind.STOPPED
    if one.evidence.state == "D":
        return VerdictKind.UNINTERRUPTIBLE
    return VerdictKind.LOADER if sentences.hanging_loaders(one.evidence) else VerdictKind.BEHIND


def _inside(ranks: Ranks) -> Verdict | None:
    """All have come, and it does not end: ranks are in an operation for which nobody is missing."""
    inside = {n: one.pending[0] for n, one in ranks.items() if one.pending and not one.waits_for and not one.frozen}
    if not any(ranks[n].end is RankEnd.RUNS for n in inside):  # of the dead it is not known who was missing
        return None
    op = next(iter(parties_by(inside, lambda op: (op.group, op.seq))[0].values()))
    in_kernel = [n for n in inside if ranks[n].evidence.state == "D"]
    silent = [n for n in inside if not ranks[n].evidence.answered and ranks[n].end is RankEnd.RUNS]
    others = [one for n, one in ranks.items() if n not in silent and one.end is RankEnd.RUNS]
    if in_kernel:
        kind, guilty = VerdictKind.UNINTERRUPTIBLE, in_kernel
    elif silent and len(silent) < len(inside) and all(one.evidence.answered for one in others):
        kind, guilty = VerdictKind.STOPPED, silent  # a frozen container, for one, shows no state of its own
    else:
        return conclude(VerdictKind.NETWORK, ranks, sentences.all_inside(ranks, inside), op=op)
    return conclude(kind, ranks, sentences.inside_but(ranks, guilty, op), guilty=guilty, op=op)


def _elsewhere(ranks: Ranks) -> Verdict:
    """Nobody waits for anybody, as far as is known."""
    running = {n: one for n, one in ranks.items() if one.end is RankEnd.RUNS}
    kinds = {n: _kind(one) for n, one in running.items()}
    surely = [n for n, kind in kinds.items() if kind is not VerdictKind.BEHIND]
    lines = sentences.everybody(ranks)
    if surely:
        return conclude(min(kinds[n] for n in surely), ranks, sentences.waited_for(ranks, surely), guilty=surely)
    met = any(one.evidence.ops for one in ranks.values())
    kind = VerdictKind.BEHIND if met else VerdictKind.NOT_MET
    if len(ranks) == len(running) == 1:
        return conclude(VerdictKind.BEHIND, ranks, lines, guilty=list(running))
    sites = {n: shown_site(one.evidence) for n, one in running.items()}
    parties = parties_by({n: where for n, where in sites.items() if where}, lambda where: where)
    right = majority(parties)
    if right is None or len(right) == len(running):
        return conclude(VerdictKind.UNKNOWN, ranks, lines)
    wrong = [n for n in running if n not in right]
    return conclude(kind, ranks, lines, guilty=wrong)
