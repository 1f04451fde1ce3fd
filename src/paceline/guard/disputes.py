"""Finds which ranks are wrong where ranks are at odds.

They have entered different things under the same number, or wait for each other, or some have ended for whom others
wait. Where several are wrong, what most of them do is right.

All ranks run one program. If two of them both keep to it, one is ahead of the other or both are at the same place: each
waiting for the other is impossible, and so is any circle of ranks that keep to it. Therefore, if one rank is wrong, it
is in every circle: taken away, it leaves none.

    0, 2 wait for 1, and 1 waits for 0, 2     circles 0-1 and 2-1: only 1 is in both, it is wrong
    0 waits for 1, and 1 for 0                one circle: 0 or 1 is wrong, and nobody can say which
"""

from collections.abc import Collection, Hashable, Mapping, Sequence

from paceline.contract.evidence import Phase, Verdict, VerdictKind
from paceline.guard import sentences
from paceline.guard.deaths import RankEnd
from paceline.guard.odds import Odds
from paceline.guard.waits import Rank, majority, parties_by, stream, waiting_alike

Ranks = Mapping[int, Rank]
Graph = Mapping[int, frozenset[int]]  # rank -> those for whom it waits


def dispute(ranks: Ranks, odds: Sequence[Odds]) -> Verdict | None:
    """The verdict on ranks of which one must be wrong; None where there are no such."""
    graph = _graph(ranks, odds)
    if not _a_circle(graph):
        return None
    # a training that says its phases does not end there
    amid_steps = [n for n, one in ranks.items() if one.evidence.phase not in (Phase.USER, Phase.CLOSE)]
    early = [n for n in amid_steps if ranks[n].end is RankEnd.LEFT and graph[n]]
    # in every circle; empty if several ranks are wrong
    suspects = early or [rank for rank in sorted(_a_circle(graph)) if not _a_circle(graph, without=rank)]
    parties = _parties(ranks, odds, suspects, graph)
    if early or len(suspects) == 1:
        guilty = suspects
    elif suspects or (right := majority(parties)) is None:
        guilty = []
    else:
        guilty = sorted(n for party in parties if party is not right for n in party)
    tie = [] if guilty else [sorted(party) for party in parties]
    return _told(ranks, odds, guilty, tie, graph)


def has_circle(graph: Graph) -> bool:
    """Whether some ranks wait for each other, directly or through others."""
    return bool(_a_circle(graph))


def _graph(ranks: Ranks, odds: Sequence[Odds]) -> Graph:
    """Ranks with the same edges hold one set: of 8,000 half may be at odds with the other half."""
    sources: dict[int, list[Collection[int]]] = {n: [one.waits_for] for n, one in ranks.items()}
    for each in odds:
        for party in each.parties:
            against = {n for other in each.parties if other is not party for n in other}
            for n in party:
                sources[n].append(against)
    left = {n for n, one in ranks.items() if one.end is RankEnd.LEFT}
    for waits_for, waiters in waiting_alike(ranks) if left else ():
        for n in left.intersection(waits_for):
            sources[n].append(waiters)  # who keeps to the program has nobody wait for it at its end
    graph: dict[tuple[int, ...], frozenset[int]] = {}
    for parts in sources.values():
        if (key := tuple(map(id, parts))) not in graph:
            graph[key] = frozenset().union(*parts)
    return {n: graph[tuple(map(id, parts))] for n, parts in sources.items()}


def _parties(
    ranks: Ranks, odds: Sequence[Odds], suspects: Sequence[int], graph: Graph
) -> Sequence[Mapping[int, object]]:
    if not suspects and odds:
        return odds[0].parties
    members = suspects or sorted(_knotted(graph))
    return parties_by({n: _position(ranks[n], n, members) for n in members}, lambda position: position)


def _position(one: Rank, number: int, members: Sequence[int]) -> Hashable:
    if one.end is RankEnd.LEFT:
        return "ended"
    op = sentences.held_in(one, members) or (one.pending[-1] if one.pending else None)
    return None if op is None else (stream(op, number), op.seq, op.kind, op.name, op.shape, op.dtype)


def _told(
    ranks: Ranks, odds: Sequence[Odds], guilty: Sequence[int], tie: Sequence[Sequence[int]], graph: Graph
) -> Verdict:
    involved = [*guilty, *(n for party in tie for n in party)]
    for each in odds:
        count = sum(any(n in party for n in involved) for party in each.parties)
        if count >= (1 if guilty else 2):
            right = next((party for party in each.parties if not any(n in party for n in guilty)), each.parties[0])
            op = next(iter(right.values()))
            at = next((party[n].site for n in guilty for party in each.parties if n in party), "")
            lines = sentences.at_odds(each, guilty)
            return sentences.conclude(VerdictKind.MISMATCH, ranks, lines, guilty=guilty, tie=tie, op=op, at=at)
    left = [n for n in involved if ranks[n].end is RankEnd.LEFT]
    if left:
        op, lines = sentences.awaited(ranks, left), sentences.waited_for(ranks, left)
        return sentences.conclude(VerdictKind.LEFT, ranks, lines, guilty=guilty, tie=tie, op=op)
    ended = [n for n in graph if ranks[n].end is RankEnd.LEFT and any(n in ranks[one].waits_for for one in guilty)]
    if ended:
        op, lines = sentences.awaited(ranks, ended), sentences.called_more(ranks, guilty, ended)
        return sentences.conclude(VerdictKind.MISMATCH, ranks, lines, guilty=guilty, op=op)
    groups = [list(party) for party in tie] or [list(guilty), *_rivals(ranks, guilty, graph)]
    members = [n for group in groups for n in group]
    ops = {n: op for n in members if (op := sentences.held_in(ranks[n], members)) is not None}
    op = ops.get(groups[-1][0])
    lines = sentences.in_circle(ranks, groups, ops)
    return sentences.conclude(VerdictKind.DEADLOCK, ranks, lines, guilty=guilty, tie=tie, op=op)


def _rivals(ranks: Ranks, guilty: Sequence[int], graph: Graph) -> list[list[int]]:
    """Those who wait for a guilty rank that waits for them, else all of a circle, by what they wait in."""
    wrong = set(guilty)
    mutual = [n for n in graph if n not in wrong and any(n in graph[one] for one in wrong & graph[n])]
    rivals = mutual or [n for n in _a_circle(graph) if n not in wrong]
    return [sorted(party) for party in parties_by({n: _position(ranks[n], n, guilty) for n in rivals}, lambda at: at)]


def _a_circle(graph: Graph, *, without: int | None = None) -> set[int]:
    """The ranks of one circle, of two ranks if there is such a one; empty if there is none."""
    left = _knotted(graph, without=without)
    for rank in sorted(left):
        for other in graph[rank]:
            if other in left and rank in graph[other]:
                return {rank, other}
    if not left:
        return set()
    way = [min(left)]  # who is left waits for somebody who is left: sooner or later the way comes back
    while (following := min(other for other in graph[way[-1]] if other in left)) not in way:
        way.append(following)
    return set(way[way.index(following) :])


def _knotted(graph: Graph, *, without: int | None = None) -> set[int]:
    """Those who are in a circle or wait for one: all but those that wait for nobody, or only for such, and so on."""
    holders: dict[int, list[int]] = {}  # of one set of edges: what becomes of it becomes of all of them
    for rank, others in graph.items():
        holders.setdefault(id(others), []).append(rank)
    waiters: dict[int, list[int]] = {}
    missing: dict[int, int] = {}
    done = [] if without is None else [without]
    for key, ranks in holders.items():
        its = [other for other in graph[ranks[0]] if other != without and other in graph]
        missing[key] = len(its)
        for other in its:
            waiters.setdefault(other, []).append(key)
        if not its:
            done += ranks
    seen: set[int] = set()
    for rank in done:  # grows as it goes
        for key in waiters.get(rank, ()) if rank not in seen else ():
            missing[key] -= 1
            if missing[key] == 0:
                done += holders[key]
        seen.add(rank)
    return set(graph) - seen
