"""Finds a rank that is slower than the others, or a slow network. Pure: from the time that each spends in each phase.

In lockstep everybody is as slow as the slowest, so step times say nothing. What a rank does for itself (data, forward,
backward, optimizer) is set against that of the others; what is left is waiting. Where nobody works long and everybody
waits, also the one who comes last, the waiting is the network's.

Example: 3 ranks, of which one needs 0.5 s to load a batch: own times 0.1, 0.6, 0.1 s, waiting 0.5, 0, 0.5 s a step.
With DDP the waiting is in the others' backward pass instead, 0.6, 0.1, 0.6 s; so phases that never wait (data,
forward, optimizer) are also compared alone.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from statistics import median

from paceline.contract.evidence import Phase, Sample

FIRST_STEPS = 5  # of a start: compiling, filling caches
LOOK_STEPS, LOOK_SECONDS = 10, 0.9  # from look to look, at least: batches of unlike lengths even out
RANK_SECONDS = 0.001  # the same for each rank, of many: a look takes the head some microseconds for each
LOOKS = 3  # in a row that are judged
QUEUED_LOOKS = 8  # that are where a rank is slow because it waits for a core
SLOW_FACTOR = 1.3
CHANGE_FACTOR = 1.5  # said again only where it has become so much worse
LEAST_SECONDS = 0.02  # a step: less is the noise of a machine that does something else, too
LEAST_OF_TWICE = 0.01  # the same of a rank that takes twice as long as the others
LEAST_SYNC_SECONDS = 0.05  # a step: where all is faster than that, the network does what it can

OWN = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
NEVER_WAITING = (Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER)
OF_SCRIPTS = (*NEVER_WAITING, Phase.USER)

Look = Mapping[int, Sample]  # of all ranks that run
Spent = Mapping[int, tuple[float, ...]]  # rank -> seconds in each phase, per step
Slow = tuple[int, str, float]  # which rank, the sentence, by how many seconds a step


class Slowness:
    """What has been said of one generation so far, and since when it is measured."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._hosts = hosts
        self._first: dict[int, int] = {}
        self._looks: list[Look] = []  # the newest last
        self._judged: list[tuple[Slow | None, Slow | None]] = []  # between two looks: without what queues take, with
        self._said: dict[str, float] = {}
        self.rank: int | None = None
        """that the last sentence was about"""

    def see(self, samples: Sequence[Sample]) -> str:
        """A sentence that is new, or empty. To be called with all ranks that run, again and again."""
        if len(samples) < 2 or any(one.phase is Phase.USER and not one.script for one in samples):
            return ""
        first = [self._first.setdefault(one.rank, one.step) for one in samples]
        now = {one.rank: one for one in samples}
        started = all(one.step >= step + FIRST_STEPS for one, step in zip(samples, first, strict=True))
        if not started or (self._looks and not _apart(self._looks[-1], now)):
            return ""
        self._looks = [*self._looks, now][-LOOKS - 1 :]
        if len(self._looks) == 1:
            return ""
        scripts = all(one.script for one in samples)
        judge, last = slow_script if scripts else slow_rank, self._looks[-2]
        found = [judge(_per_step(last, now, of_queue=of_queue), self._hosts) for of_queue in (True, False)]
        self._judged = [*self._judged, (found[0], found[1])][-QUEUED_LOOKS:]
        if len(self._judged) < LOOKS:
            return ""
        slow = self._all_the_time()
        self.rank = slow[0] if slow else None
        if slow:
            return self._new(f"rank {self.rank}", *slow[1:])
        if scripts:  # of which nobody knows what they do for themselves
            return ""
        return self._new("network", *(slow_network(_per_step(self._looks[0], now)) or ("", 0.0)))

    def _all_the_time(self) -> Slow | None:
        """Who is slow in each look, and by how much in most: some steps of a script are nothing.

        What a rank waits for a core is mostly the machine's, and passes: then it must be so for longer.
        """
        for count, which in ((LOOKS, 0), (QUEUED_LOOKS, 1)):
            slow = [one for pair in self._judged[-count:] if (one := pair[which]) is not None]
            if len(slow) == count and len({one[0] for one in slow}) == 1:
                return sorted(slow, key=lambda one: one[2])[count // 2]
        return None

    def _new(self, what: str, words: str, measure: float) -> str:
        if measure <= self._said.get(what, 0.0) * CHANGE_FACTOR:
            return ""
        self._said[what] = measure
        return words


def _apart(base: Look, now: Look) -> bool:
    """Whether every rank has gone on long enough in between for a look of its own."""
    seconds = max(LOOK_SECONDS, len(now) * RANK_SECONDS)
    return all(
        rank in base
        and one.step >= base[rank].step + LOOK_STEPS
        and sum(one.phase_seconds) >= sum(base[rank].phase_seconds) + seconds
        for rank, one in now.items()
    )


def _per_step(base: Look, now: Look, *, of_queue: bool = False) -> Spent:
    """What each rank has spent; `of_queue`: without what it has waited for a core, by so much longer than the others.

    Nobody knows in which phase it has: it is taken from all of its own, in proportion.
    """
    queued = {rank: (one.queued_seconds - base[rank].queued_seconds) for rank, one in now.items()}
    ordered = sorted(queued.values())
    found: dict[int, tuple[float, ...]] = {}
    for rank, one in now.items():
        spent = [b - a for a, b in zip(base[rank].phase_seconds, one.phase_seconds, strict=True)]
        work = sum(spent[phase] for phase in OF_SCRIPTS)
        longer = max(0.0, queued[rank] - median_without(ordered, queued[rank])) if of_queue and len(now) > 1 else 0.0
        kept = max(0.0, 1 - longer / work) if work else 1.0
        steps = one.step - base[rank].step
        found[rank] = tuple(
            seconds * (kept if phase in OF_SCRIPTS else 1) / steps for phase, seconds in zip(Phase, spent, strict=True)
        )
    return found


def slow_rank(spent: Spent, hosts: Mapping[int, str]) -> Slow | None:
    """Which of two ranks or more is slower than the others, the sentence, by how many seconds a step."""
    own = {rank: sum(seconds[phase] for phase in OWN) for rank, seconds in spent.items()}
    alone = {rank: sum(seconds[phase] for phase in NEVER_WAITING) for rank, seconds in spent.items()}
    for work in (own, alone):
        rank = max(work, key=lambda r: work[r])
        usual, excess = _others(work, rank), work[rank] - _others(work, rank)
        if excess >= max(LEAST_SECONDS, (SLOW_FACTOR - 1) * _others(own, rank)):
            break
    else:
        return None
    each = [{r: seconds[phase] for r, seconds in spent.items()} for phase in Phase]
    phase = max(NEVER_WAITING if work is alone else OWN, key=lambda p: each[p][rank] - _others(each[p], rank))
    words = (
        f"rank {rank} ({hosts.get(rank, '?')}) is slow: {_seconds(work[rank])} of its own work a step, "
        f"{'the other' if len(spent) == 2 else 'the others'} {_seconds(usual)}; most of it in {phase.word}"
    )
    return rank, words, excess


def slow_script(spent: Spent, hosts: Mapping[int, str]) -> Slow | None:
    """The same where phases are seen from outside: a rank is slow in what the others wait for, as long, elsewhere."""
    work = {rank: sum(seconds[phase] for phase in OF_SCRIPTS) for rank, seconds in spent.items()}
    waits = {rank: seconds[Phase.BACKWARD] + seconds[Phase.SYNC] for rank, seconds in spent.items()}
    rank = max(work, key=lambda r: work[r])
    usual, excess = _others(work, rank), work[rank] - _others(work, rank)
    least = min(max(LEAST_SECONDS, (SLOW_FACTOR - 1) * usual), max(LEAST_OF_TWICE, usual))
    if excess < least or _others(waits, rank) - waits[rank] < excess / 2:
        return None
    each = {phase: {r: seconds[phase] for r, seconds in spent.items()} for phase in OF_SCRIPTS}
    phase = max(each, key=lambda p: each[p][rank] - _others(each[p], rank))
    words = (
        f"rank {rank} ({hosts.get(rank, '?')}) is slow: {_seconds(work[rank])} of its own work a step, "
        f"{'the other' if len(spent) == 2 else 'the others'} {_seconds(usual)}; most of it in "
        f"{'its own code' if phase is Phase.USER else phase.word}"
    )
    return rank, words, excess


def slow_network(spent: Spent) -> tuple[str, float] | None:
    """Whether all ranks wait most of the time, also the one that waits least: the sentence, seconds a step."""
    own = {rank: sum(seconds[phase] for phase in OWN) for rank, seconds in spent.items()}
    sync_seconds = min(seconds[Phase.SYNC] for seconds in spent.values())
    if sync_seconds < LEAST_SYNC_SECONDS or sync_seconds <= max(own.values()):
        return None
    words = (
        f"slow network or collective: every rank waits at least {_seconds(sync_seconds)} a step for the others, and "
        f"works {_seconds(median(own.values()))}"
    )
    return words, sync_seconds


def _others(of: Mapping[int, float], rank: int) -> float:
    """The median of the others."""
    return median_without(sorted(of.values()), of[rank])


def median_without(ordered: Sequence[float], value: float) -> float:
    """The median of all but one `value`; for each of thousands of ranks they are not sorted again."""
    at, left = bisect_left(ordered, value), len(ordered) - 1
    low, high = (left - 1) // 2, left // 2
    return (ordered[low + (low >= at)] + ordered[high + (high >= at)]) / 2


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.0f} ms"
