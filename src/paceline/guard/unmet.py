"""Finds ranks that wait in collectives which can never complete, long before the window is over. Pure.

A rank that is late and a rank that hangs look alike, so the guard waits for the window before it names one. Two cases
leave no doubt, whatever the other ranks still do:

- Two ranks wait under the same number of the same group, and the operation, the shape, the type or the root differs
  (in shared memory also the name): the transport never pairs them.
- Ranks wait for each other in a circle: each of them stands in a collective that another one of them has not called.

Each of these ranks must stand inside its call, must have answered, and must not have moved for UNMET_SECONDS.
Operations that a rank has started and does not wait for count for neither, nor do messages between two ranks.
"""

from collections.abc import Mapping, Sequence

from paceline.contract.evidence import SHARED_GROUP, Evidence, Op, Sample
from paceline.contract.places import stands_at, waits_for_ranks
from paceline.contract.windows import Windows
from paceline.guard.deaths import RankEnd
from paceline.guard.judge import has_circle
from paceline.guard.waits import Odds, Rank, find_odds, split, waiting_graph

UNMET_SECONDS = 2.0  # for which nothing of the ranks has moved
MAX_UNMET_SECONDS = 8.0  # the same in a run whose ranks often wait as long for a good reason
SAME_SECONDS = 1.5  # what two looks at the same moment may differ by
IDLE_CPU_SECONDS = 0.5  # in a second; a rank that uses more may still come


class Unmet:
    """When to ask the ranks of one generation what they wait in."""

    def __init__(self, windows: Windows) -> None:
        self._off = windows.off
        self._after_seconds, self._next_seconds = UNMET_SECONDS, 0.0
        self._asked: dict[int, float] = {}  # rank -> since when it had not moved, at the last question

    def due(self, now_seconds: float, running: Sequence[Sample]) -> bool:
        """Whether to ask: two ranks or more have waited for long enough, and one of them has moved since last time.

        Each question that finds nothing doubles the time for which ranks must have waited, up to MAX_UNMET_SECONDS.
        """
        if self._off or now_seconds < self._next_seconds:
            return False
        still = [one for one in running if one.waiting and one.still_seconds >= self._after_seconds]
        since = {one.rank: now_seconds - one.still_seconds for one in still}
        if len(since) < 2 or all(self._is_known(rank, at) for rank, at in since.items()):
            return False
        self._asked = since
        self._after_seconds = min(2 * self._after_seconds, MAX_UNMET_SECONDS)
        self._next_seconds = now_seconds + self._after_seconds
        return True

    def _is_known(self, rank: int, since_seconds: float) -> bool:
        return since_seconds <= self._asked.get(rank, float("-inf")) + SAME_SECONDS


def never_meet(evidence: Sequence[Evidence]) -> bool:
    """Whether ranks wait in collectives that can never complete, whatever the others do."""
    ranks = waiting_graph(evidence)
    held = {n: op for n, one in ranks.items() if (op := _held(one)) is not None}
    if len(held) < 2:
        return False
    return any(_differ(each, held) for each in find_odds(ranks)) or has_circle(_edges(ranks, held))


def _held(one: Rank) -> Op | None:
    """The collective in which this rank surely waits; None if that is not certain."""
    evidence = one.evidence
    if one.end is not RankEnd.RUNS or one.frozen or not evidence.answered or evidence.still_seconds < UNMET_SECONDS:
        return None
    if evidence.cpu_seconds > IDLE_CPU_SECONDS or waits_for_ranks(evidence) is not True:
        return None
    on_stack = [op for op in one.pending if not op.is_message and stands_at(evidence, op)]
    return on_stack[-1] if on_stack else None


def _differ(odds: Odds, held: Mapping[int, Op]) -> bool:
    """Whether two of those that wait have entered what no transport pairs."""
    ops = {n: op for party in odds.parties for n, op in party.items() if held.get(n) == op}
    return len(ops) > 1 and len(split(ops, by_name=odds.stream[0].startswith(SHARED_GROUP))) > 1


def _edges(ranks: Mapping[int, Rank], held: Mapping[int, Op]) -> Mapping[int, frozenset[int]]:
    """Those who wait, and for whom of each other; ranks with the same edges share one set."""
    shared: dict[tuple[int, Op], frozenset[int]] = {}
    for n, op in held.items():
        waits_for = ranks[n].waits_for
        key = id(waits_for), op
        if key not in shared:
            shared[key] = frozenset(other for other, its in waits_for.items() if its == op and other in held)
    return {n: shared[id(ranks[n].waits_for), op] for n, op in held.items()}
