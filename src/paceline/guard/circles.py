"""Who can be wrong, where ranks wait for each other in circles?

All ranks run one program. If two of them both keep to it, one is ahead of the other or both are at the same place: each
waiting for the other is impossible, and so is any circle of ranks that keep to it. Therefore, if one rank is wrong, it
is in every circle: taken away, it leaves none.

    0, 2 wait for 1, and 1 waits for 0, 2     circles 0-1 and 2-1: only 1 is in both, it is wrong
    0 waits for 1, and 1 for 0                one circle: 0 or 1 is wrong, and nobody can say which
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

Graph = Mapping[int, Collection[int]]  # rank -> those for whom it waits


def in_every_circle(graph: Graph) -> list[int]:
    """The ranks without each of which there is no circle; empty if there is none, or if several ranks are wrong."""
    return [rank for rank in sorted(a_circle(graph)) if not a_circle(graph, without=rank)]


def a_circle(graph: Graph, *, without: int | None = None) -> set[int]:
    """The ranks of one circle, of two ranks if there is such a one; empty if there is none."""
    left = knotted(graph, without=without)
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


def knotted(graph: Graph, *, without: int | None = None) -> set[int]:
    """Those who are in a circle or wait for one: all but who waits for nobody, who waits only for such, and so on."""
    waiters: dict[int, list[int]] = {}
    missing: dict[int, int] = {}
    for rank, others in graph.items():
        its = [other for other in others if without not in (rank, other) and other in graph]
        missing[rank] = len(its)
        for other in its:
            waiters.setdefault(other, []).append(rank)
    done = [rank for rank, count in missing.items() if count == 0]
    for rank in done:  # grows as it goes
        for waiter in waiters.get(rank, ()):
            missing[waiter] -= 1
            if missing[waiter] == 0:
                done.append(waiter)
    return set(graph) - set(done)
