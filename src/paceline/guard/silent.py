"""Finds faults of a script that raise no error: replicas that drift apart, gradients that are not finite. Pure.

`SilentFaultDetector.see` processes samples of all ranks repeatedly. It gives the notices to report at once, and, if
results are wrong, the verdict by which the run is to be ended.

Marks of the ranks are compared: parameters that must be equal, and collectives that must be in one order. Only marks of
one number are compared, and only if all ranks that must be equal have it. Parameters that DDP keeps equal must be equal
from the first step on. Others must be only if they were equal several times while they changed, and were never unequal
and equal again, as replicas are that are averaged now and then.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from paceline.guard.detectors import median_without
from paceline.guard.sentences import format_ranks, verb
from paceline.guard.waits import majority, parties_by
from paceline.protocol.evidence import Evidence, Op, Sample, ScriptFinding, Verdict, VerdictKind
from paceline.protocol.marks import (
    SAME_BY_DDP,
    SETTINGS,
    SUMMED,
    Mismatch,
    Order,
    ReplicaFingerprint,
    compare_orders,
    fingerprints_of,
    order_label,
    orders_of,
)

NO_PART = 0xFFFFFFFF
PROOFS = 3  # times that a part was equal, and another than before
ROUND_OFF = 1e-5  # of a sum, relatively
WINDOW = 4  # calls, by which it is judged how ranks part

Marks = Mapping[int, ReplicaFingerprint]  # rank -> its mark of one number
Calls = Sequence[int]


@dataclass(frozen=True)
class Difference:
    """Marks that differ between ranks."""

    marks: Marks
    at: int  # which part of the mark
    equal_before: int  # the last number at which all had the same; 0: none

    @property
    def mark(self) -> ReplicaFingerprint:
        """The mark of any rank, for the fields that are equal on all."""
        return next(iter(self.marks.values()))

    @property
    def parties(self) -> Sequence[Mapping[int, int]]:
        """Ranks with equal hashes, the largest party first."""
        hashes = {rank: mark.hashes[self.at] for rank, mark in self.marks.items()}
        return parties_by(hashes, lambda value: value)

    @property
    def guilty(self) -> tuple[int, ...]:
        """The ranks in the minority; none if there is no majority."""
        right = majority(self.parties)
        return tuple(rank for rank in sorted(self.marks) if rank not in right) if right is not None else ()

    @property
    def by_round_off(self) -> bool:
        """Whether it is as small as the round-off between machines of different kinds."""
        sums = [mark.sums[self.at] for mark in self.marks.values()]
        return bool(self.mark.flags & SUMMED) and max(sums) - min(sums) <= ROUND_OFF * max(map(abs, sums))


class ReplicaComparison:
    """The comparison of the marks of one generation so far."""

    def __init__(self) -> None:
        self._equal: dict[tuple[int, int, int], tuple[int, int, int]] = {}  # part -> last number, hash, proofs
        self._differed: dict[tuple[int, int, int], int] = {}  # part -> the last number at which it was not
        self._apart: set[tuple[int, int, int]] = set()  # parts that ranks may have each for itself
        self._last: dict[tuple[int, int], int] = defaultdict(int)  # table -> the last number at which all was equal

    @property
    def proven(self) -> bool:
        """Whether there are parameters that only the script keeps equal."""
        return any(proofs >= PROOFS for *_, proofs in self._equal.values())

    def see(self, marks: Mapping[int, Sequence[ReplicaFingerprint]]) -> list[Difference]:
        """The first difference in each table."""
        together: dict[tuple[int, int, int], dict[int, ReplicaFingerprint]] = defaultdict(dict)
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


def _part(mark: ReplicaFingerprint, at: int) -> tuple[int, int, int]:
    return mark.table, mark.layout, mark.parts[at]


class CallOrderComparison:
    """The comparison of the calls of one generation so far, by group."""

    def __init__(self) -> None:
        self._done: dict[int, int] = defaultdict(int)  # group -> how many calls
        self.agreed: set[int] = set()
        """hashes of calls that all ranks have made at one place in the order"""

    def see(self, orders: Mapping[int, Sequence[Order]], *, last: bool) -> Iterator[tuple[int, Mapping[int, Calls]]]:
        """The places at which ranks differ: the number of calls over their group before, and the calls of each after.

        WINDOW calls after the place must be known, unless these are the last. A place is given once.
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


def find_order_mismatch(windows: Mapping[int, Sequence[Op]], known: frozenset[str]) -> Mismatch | None:
    """The mismatch in calls of the ranks at one place in the order; None if they are branches of the script.

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


LOOKS = 3  # until every rank will have told what it has seen, or it is known that it has died
LATE_STEPS = 20  # after which the others will not tell it any more
MOST_PARTIES = 4
SHORT = 0.5  # of the others' steps: so few are told, though they may be meant
FEWER = 0.8  # the same, where nothing says that ranks must take as many: replicas that are averaged now and then

AskCalls = Callable[[], Mapping[int, Mapping[int, Op]]]
Names = Callable[[], Mapping[str, Sequence[str]]]


class Notice(NamedTuple):
    """A report on a run that does not end it."""

    kind: str
    words: str
    rank: int | None = None  # None: it is about several
    step: int = 0


class SilentFaultDetector:
    """Detects silent faults of one generation, and remembers which were reported."""

    def __init__(self, world_size: int, names: Names, calls: AskCalls) -> None:
        """`names` gives the names of tensors, `calls` the operations behind the hashes of each rank's calls."""
        self._size, self._names, self._calls = world_size, names, calls
        self._comparison, self._orders = ReplicaComparison(), CallOrderComparison()
        self._said: set[tuple[object, ...]] = set()
        self._looks: dict[str, int] = {}  # since the first rank has told of something of this kind
        self._known: Mapping[int, Mapping[int, Op]] = {}
        self.notices: list[Notice] = []
        """to be said; emptied by who has said them"""

    def see(self, ranks: Sequence[Sample], *, last: bool = False) -> list[Verdict]:
        """Process samples of all ranks, including ended ones; `last`: all have ended well. Each verdict comes once."""
        self._swallowed(ranks)
        self._stale(ranks, last=last)
        self._left(ranks)
        collective = self._collective(ranks, last=last)
        if collective is not None and last and (uneven := self._uneven(ranks)) is not None:
            collective = replace(collective, sentences=(*collective.sentences, *uneven.sentences))
        found = [collective, self._not_finite(ranks, last=last)]
        if last and any(one.uneven for one in ranks):
            self._shadowed(ranks)
        if any(one.uneven for one in ranks) or any((kind,) not in self._said for kind in self._looks):
            return [one for one in found if one is not None]
        differences = self._comparison.see({one.rank: fingerprints_of(one.marks) for one in ranks if one.marks})
        orders = {one.rank: orders_of(one.orders) for one in ranks if one.orders}
        found += [self._order(at, calls) for at, calls in self._orders.see(orders, last=last)]
        uneven = self._uneven(ranks) if last else None
        for one in differences:
            drifted = self._drifted(one, ranks)
            if drifted is not None and uneven is not None:  # why they drifted, perhaps
                drifted, uneven = replace(drifted, sentences=(*drifted.sentences, *uneven.sentences)), None
            found.append(drifted)
        return [one for one in (*found, uneven) if one is not None]

    def _new(self, *what: object) -> bool:
        known = what in self._said
        self._said.add(what)
        return not known

    def _swallowed(self, ranks: Sequence[Sample]) -> None:
        for one in ranks:
            for found in one.findings:
                if found.kind == "swallowed" and self._new("swallowed", one.rank, found.words):
                    self.notices.append(Notice("swallowed", f"rank {one.rank} {_went_on(found)}", one.rank, found.step))
                if found.kind == "thread" and self._new("thread", one.rank, found.words):
                    words = f"rank {one.rank}: {found.words} (after step {found.step})"
                    self.notices.append(Notice("thread", words, one.rank, found.step))

    def _awaits(self, kind: str, told: Mapping[int, ScriptFinding], *, last: bool) -> bool:
        self._looks[kind] = self._looks.get(kind, 0) + 1
        return len(told) < self._size and self._looks[kind] < LOOKS and not last

    def _collective(self, ranks: Sequence[Sample], *, last: bool) -> Verdict | None:
        """A collective that failed on some ranks, which ignored the error: at least one batch is lost."""
        told = {one.rank: found for one in ranks for found in one.findings if found.kind == "collective"}
        if not told or ("collective",) in self._said or self._awaits("collective", told, last=last):
            return None
        self._said.add(("collective",))
        lines = [f"rank {rank} {_went_on(found)}" for rank, found in sorted(told.items())]
        lines += [
            f"rank {one.rank} {_went_on(found)}" for one in ranks for found in one.findings if found.kind == "swallowed"
        ]
        odd = {one.rank: found for one in ranks for found in one.findings if found.kind == "stale"}
        odd = odd if len(odd) < self._size else {}
        others = tuple(one.rank for one in ranks if one.rank not in told)
        if others:
            lines.append(
                f"{format_ranks(others)} {verb(others, 'has', 'have')} called fewer collectives, or other ones"
            )
        lines += [f"rank {rank} {found.words} (step {found.step})" for rank, found in odd.items()]
        guilty = others or tuple(sorted(odd))
        return Verdict(VerdictKind.SWALLOWED, guilty, sentences=tuple(lines), step=max(f.step for f in told.values()))

    def _stale(self, ranks: Sequence[Sample], *, last: bool) -> None:
        """Findings that only some ranks have reported, after all had the time to."""
        told = [(one.rank, found) for one in ranks for found in one.findings if found.kind == "stale"]
        least = min(one.step for one in ranks)
        for what in {found.words.partition(",")[0] for _, found in told}:
            alike = [(rank, found) for rank, found in told if found.words.startswith(what)]
            late = last or all(least > found.step + LATE_STEPS for _, found in alike)
            if late and len({rank for rank, _ in alike}) < self._size and self._new("stale", what):
                self.notices += [
                    Notice("stale", f"rank {rank} {found.words} (step {found.step})", rank, found.step)
                    for rank, found in alike
                ]

    def _left(self, ranks: Sequence[Sample]) -> None:
        """All ranks continue without DDP, after they have trained through it; it may be on purpose."""
        told = {one.rank: found.step for one in ranks for found in one.findings if found.kind == "left"}
        if len(told) == self._size > 1 and self._new("left"):
            step = min(told.values())
            words = f"after step {step} no rank trains through DDP any more: from then on its steps and "
            self.notices.append(Notice("left", words + "parameters are its own, and are not compared", None, step))

    def _shadowed(self, ranks: Sequence[Sample]) -> None:
        """Ranks that Join has shadowed for most of the time: their data may have ended too early."""
        ordered = sorted(one.joint_steps for one in ranks)
        for one in ranks if len(ranks) > 1 else ():
            others = median_without(ordered, one.joint_steps)
            if one.joint_steps < SHORT * others and self._new("shadowed", one.rank):
                words = f"rank {one.rank} took {one.joint_steps} steps, the others {others:g}: Join hides it, "
                words += "should its data have ended too early"
                self.notices.append(Notice("shadowed", words, one.rank, one.joint_steps))

    def _not_finite(self, ranks: Sequence[Sample], *, last: bool) -> Verdict | None:
        told = {one.rank: found for one in ranks for found in one.findings if found.kind == "not finite"}
        if not told or ("not finite",) in self._said or self._awaits("not finite", told, last=last):
            return None
        self._said.add(("not finite",))
        step = min(found.step for found in told.values())
        own = {rank: found for rank, found in sorted(told.items()) if found.own and found.step <= step + 1}
        lines = [f"rank {rank}: {found.words}" for rank, found in own.items()]
        first = [rank for rank, found in told.items() if found.step == step]
        if not own and len(first) < self._size:  # what it is after its step goes into the others' one step later
            own = {rank: told[rank] for rank in sorted(first)}
            lines = [
                f"{format_ranks(own)} alone: all ranks' own gradients and losses were finite, and so was their sum"
            ]
        elif not own:
            lines = ["every rank's own gradients and losses were finite, their sum over ranks is not"]
        lines.append(
            f"{format_ranks(told)} {verb(told, 'has', 'have')} updated parameters with gradients that are NaN or infinite"
        )
        guilty = tuple(sorted(own or told))
        guilty = guilty if len(guilty) < self._size or self._size == 1 else ()
        return Verdict(VerdictKind.NOT_FINITE, guilty, sentences=tuple(lines), step=step)

    def _drifted(self, one: Difference, ranks: Sequence[Sample]) -> Verdict | None:
        names, mark = self._names().get(str(one.mark.layout), ()), one.mark
        part = mark.parts[one.at]
        tensor = names[part] if part < len(names) else f"part {part}"
        before = f" (after step {one.equal_before} all had the same)" if one.equal_before else ""
        if one.by_round_off:
            if self._new("round-off", mark.layout):
                words = f"after step {mark.number} {tensor} differs between ranks, by less than 1e-5: by round-off, "
                words += "where machines or devices are of different kinds. Over many steps it may grow"
                self.notices.append(Notice("round-off", words, None, mark.number))
            return None
        if not self._new("drift", mark.table, mark.layout):
            return None
        lines = [*_parties(one, tensor, mark.number, before), *_unequal_settings(one.marks)]
        told = [(rank.rank, found) for rank in ranks for found in rank.findings if found.step <= mark.number + 1]
        lines += [
            f"rank {rank} had gone on after {found.words} (before step {found.step})"
            for rank, found in told
            if found.kind == "swallowed"
        ]
        odd = {rank: f"rank {rank} {found.words} (step {found.step})" for rank, found in told if found.kind == "stale"}
        odd = odd if len(odd) < self._size else {}
        guilty = one.guilty or tuple(sorted(odd))  # no majority says who is wrong, but what one alone has done
        tie = () if guilty else tuple(tuple(sorted(party)) for party in one.parties)
        return Verdict(VerdictKind.DIVERGED, guilty, tie, (*lines, *odd.values()), step=mark.number)

    def _order(self, at: int, calls: Mapping[int, Calls]) -> Verdict | None:
        if ("order",) in self._said:
            return None
        if any(call not in self._known.get(rank, {}) for rank, of_rank in calls.items() for call in of_rank):
            self._known = self._calls()
        known = self._known
        windows = {rank: [known.get(rank, {}).get(call, Op("", 0, "?")) for call in of_rank]
                   for rank, of_rank in calls.items()}  # fmt: skip
        agreed = {op.site for of_rank in known.values() for call, op in of_rank.items() if call in self._orders.agreed}
        found = find_order_mismatch(windows, frozenset(agreed - {""}))
        if found is None:
            return None
        self._said.add(("order",))
        return _misordered(found, sorted(windows), at + 1)

    def _uneven(self, ranks: Sequence[Sample]) -> Verdict | None:
        ddp = any(mark.flags & SAME_BY_DDP for one in ranks for mark in fingerprints_of(one.marks))
        steps = {one.rank: one.joint_steps for one in ranks}
        if len({*steps.values()}) < 2 or not self._new("uneven"):
            return None
        if not (ddp or self._comparison.proven):
            ordered = sorted(steps.values())
            for rank, step in steps.items():
                others = median_without(ordered, step)
                if 0 < step < FEWER * others:
                    words = f"rank {rank} took {step} steps, the others {others:g}: "
                    words += "is its part of the data meant to be so small?"
                    self.notices.append(Notice("few steps", words, rank, step))
            return None
        parties = parties_by(steps, lambda step: step)
        right = majority(parties)
        lines = tuple(f"{format_ranks(party)} took {next(iter(party.values()))} steps" for party in reversed(parties))
        wrong = () if right is None else tuple(rank for rank in steps if rank not in right)
        tie = () if wrong else tuple(tuple(sorted(party)) for party in parties)
        return Verdict(VerdictKind.DIVERGED, wrong, tie, lines, step=max(steps.values()))


def _went_on(found: ScriptFinding) -> str:
    """ "went on after ValueError in its forward, at train.py:7: ... (before step 5)"."""
    if found.last:
        return f"swallowed {found.words} (after step {found.step}, its last)"
    return f"went on after {found.words} (before step {found.step})"


def _parties(one: Difference, tensor: str, step: int, before: str) -> list[str]:
    if one.guilty:
        others = [rank for rank in one.marks if rank not in one.guilty]
        return [f"{format_ranks(one.guilty)} {verb(one.guilty, 'has', 'have')} another {tensor} than {format_ranks(others)} "
                f"after step {step}{before}"]  # fmt: skip
    told = " against ".join(format_ranks(party) for party in one.parties[:MOST_PARTIES])
    return [f"{tensor} differs after step {step}{before}: {told}; no majority says which is right"]


def _unequal_settings(marks: Marks) -> Iterator[str]:
    """The settings of the optimizer that differ between ranks: a cause, even if no majority shows which is right."""
    for n, name in enumerate(SETTINGS):
        parties = parties_by({rank: f"{mark.settings[n]:.7g}" for rank, mark in marks.items()}, str)
        if len(parties) > 1:
            told = (f"{next(iter(party.values()))} on {format_ranks(party)}" for party in parties[:MOST_PARTIES])
            yield f"the optimizer's {name}, added up over parameter groups, is {' against '.join(told)}"


def _misordered(found: Mismatch, ranks: Sequence[int], number: int) -> Verdict:
    of_rank = dict(zip(ranks, found.calls, strict=True))
    lines = [
        f"about call {number} over all ranks: {found.words}",
        "in another order, values of the same shape mix silently",
    ]
    op = next((call for rank, call in of_rank.items() if rank not in found.odd), None)
    site = next((call.site for rank, call in of_rank.items() if rank in found.odd and call is not None), "")
    tie = () if found.odd else tuple((rank,) for rank in ranks)
    return Verdict(VerdictKind.MISMATCH, found.odd, tie, tuple(lines), op, site)


def calls_of(evidence: Sequence[Evidence]) -> dict[int, dict[int, Op]]:
    """The operations behind the hashes of each rank's calls."""
    return {one.rank: {int(key): op for key, op in one.calls.items() if key.isdecimal()} for one in evidence}
