"""Compares what ranks have marked: parameters that must be equal, and collectives that must come in one order. Pure.

Only marks of one number are compared, of as many ranks as must have the same. Parameters that DDP keeps equal must be
so from the first step on. Others must only if they were seen to be: equal, while they changed, several times before,
and never apart and together again, as replicas are that are averaged now and then.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.contract.evidence import Op
from paceline.contract.marks import SAME_BY_DDP, SUMMED, Mark, Order
from paceline.contract.order import Mismatch, compare_orders, order_label
from paceline.guard.waits import majority, parties_by

NO_PART = 0xFFFFFFFF
PROOFS = 3  # times that a part was equal, and another than before
ROUND_OFF = 1e-5  # of a sum, relatively
WINDOW = 4  # calls, by which it is judged how ranks part

Marks = Mapping[int, Mark]  # rank -> its mark of one number
Calls = Sequence[int]


@dataclass(frozen=True)
class Difference:
    """Where ranks have marked another thing than others."""

    marks: Marks
    at: int  # which part of the mark
    equal_before: int  # the last number at which all had the same; 0: none

    @property
    def mark(self) -> Mark:
        """That of any rank: what all have in common is the same in all."""
        return next(iter(self.marks.values()))

    @property
    def parties(self) -> Sequence[Mapping[int, int]]:
        """Ranks that have the same, the largest party first."""
        hashes = {rank: mark.hashes[self.at] for rank, mark in self.marks.items()}
        return parties_by(hashes, lambda value: value)

    @property
    def guilty(self) -> tuple[int, ...]:
        """The ranks in the minority; none where there is no majority."""
        right = majority(self.parties)
        return tuple(rank for rank in sorted(self.marks) if rank not in right) if right is not None else ()

    @property
    def by_round_off(self) -> bool:
        """Whether it is as small as what machines of different kinds make of the same calculation."""
        sums = [mark.sums[self.at] for mark in self.marks.values()]
        return bool(self.mark.flags & SUMMED) and max(sums) - min(sums) <= ROUND_OFF * max(map(abs, sums))


class ComparedMarks:
    """What is known by the marks of one generation so far."""

    def __init__(self) -> None:
        self._equal: dict[tuple[int, int, int], tuple[int, int, int]] = {}  # part -> last number, hash, proofs
        self._differed: dict[tuple[int, int, int], int] = {}  # part -> the last number at which it was not
        self._apart: set[tuple[int, int, int]] = set()  # parts that ranks may have each for itself
        self._last: dict[tuple[int, int], int] = defaultdict(int)  # table -> the last number at which all was equal

    @property
    def proven(self) -> bool:
        """Whether there are parameters that nobody keeps equal but the script."""
        return any(proofs >= PROOFS for *_, proofs in self._equal.values())

    def see(self, marks: Mapping[int, Sequence[Mark]]) -> list[Difference]:
        """The first difference in each table."""
        together: dict[tuple[int, int, int], dict[int, Mark]] = defaultdict(dict)
        for rank, found in marks.items():
            for mark in found:
                together[mark.table, mark.layout, mark.number][rank] = mark
        found_all: dict[tuple[int, int], Difference] = {}
        for (*key, number), ranks in sorted(together.items()):
            table, layout = key
            if not 1 < next(iter(ranks.values())).parties <= len(ranks):
                continue
            at = self._differs(ranks)
            if at is not None:
                found_all.setdefault((table, layout), Difference(ranks, at, self._last[table, layout]))
            elif (table, layout) not in found_all:
                self._last[table, layout] = max(self._last[table, layout], number)
        return [one for one in found_all.values() if _part(one.mark, one.at) not in self._apart]

    def _differs(self, ranks: Marks) -> int | None:
        one = next(iter(ranks.values()))
        for at, part in enumerate(one.parts):
            hashes, key = {mark.hashes[at] for mark in ranks.values()}, _part(one, at)
            number, value, proofs = self._equal.get(key, (0, 0, 0))
            if part == NO_PART:
                continue
            if len(hashes) > 1:
                if one.flags & SAME_BY_DDP:
                    return at
                self._differed[key] = one.number
                if proofs >= PROOFS and key not in self._apart:
                    return at
                self._apart.add(key)
            elif one.number > number:
                moved = number > 0 and hashes != {value}
                if self._differed.get(key, one.number) < one.number:
                    self._apart.add(key)
                self._equal[key] = one.number, min(hashes), proofs + moved
        return None


def _part(mark: Mark, at: int) -> tuple[int, int, int]:
    return mark.table, mark.layout, mark.parts[at]


class ComparedOrders:
    """How far the calls of one generation have been compared, by group."""

    def __init__(self) -> None:
        self._done: dict[int, int] = defaultdict(int)  # group -> how many calls
        self.agreed: set[int] = set()
        """hashes of calls that all ranks have made at one place in the order"""

    def see(self, orders: Mapping[int, Sequence[Order]], *, last: bool) -> Iterator[tuple[int, Mapping[int, Calls]]]:
        """Where ranks part: after how many calls over their group, and what each of them has called then.

        A few calls more must have come, unless these are the last; what is given is not given again.
        """
        together: dict[int, dict[int, Order]] = defaultdict(dict)
        for rank, found in orders.items():
            for order in found:
                together[order.group][rank] = order
        for group, ranks in together.items():
            if not 1 < next(iter(ranks.values())).parties <= len(ranks):
                continue
            start = max(self._done[group], *(order.first for order in ranks.values()))
            end = min(order.made for order in ranks.values())
            while start < end:
                calls = {rank: order.calls[start - order.first : end - order.first] for rank, order in ranks.items()}
                places = enumerate(zip(*calls.values(), strict=True))
                equal = next((number for number, at in places if len({*at}) > 1), end - start)
                self.agreed.update(next(iter(calls.values()))[:equal])
                start += equal
                if start == end or (end - start < WINDOW and not last):
                    break
                yield start, {rank: of_rank[equal : equal + WINDOW] for rank, of_rank in calls.items()}
                start = min(end, start + WINDOW)
            self._done[group] = start


def departed(windows: Mapping[int, Sequence[Op]], known: frozenset[str]) -> Mismatch | None:
    """The error in calls of the ranks that have come to the same place in the order, or None: they are branches.

    `known` are the lines from which all ranks have called at one place.
    """
    ranks = sorted(windows)  # all of the world's
    found = compare_orders([windows[rank] for rank in ranks], frozenset(), known)
    if isinstance(found, Mismatch):
        return found
    for calls in zip(*(windows[rank] for rank in ranks), strict=True):
        labels = dict(zip(ranks, (order_label(op, frozenset()) for op in calls), strict=True))
        if len({*labels.values()}) > 1 and {op.site for op in calls} <= known:
            right = majority(parties_by(labels, lambda label: label))
            return Mismatch(calls, tuple(rank for rank in ranks if right is not None and rank not in right))
    return None
