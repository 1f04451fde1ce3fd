"""Finds a rank that is slower than the others, or a slow network. Pure: from the time that each spends in each phase.

In lockstep everybody is as slow as the slowest, so step times say nothing. What a rank does for itself (data, forward,
backward, optimizer) is set against that of the others; what is left is waiting. Where nobody works long and everybody
waits, also the one who comes last, the waiting is the network's.

Example: 3 ranks, of which one needs 0.5 s to load a batch: own times 0.1, 0.6, 0.1 s, waiting 0.5, 0, 0.5 s a step.
With DDP the waiting is in the others' backward pass instead, 0.6, 0.1, 0.6 s; so phases that never wait (data,
forward, optimizer) are also compared alone.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from paceline.contract.evidence import Phase, Sample

FIRST_STEPS = 5  # of a start: compiling, filling caches
MIN_STEPS, MIN_SECONDS = 15, 2.0  # of what is judged
SLOW_FACTOR = 1.3
CHANGE_FACTOR = 1.5  # said again only where it has become so much worse
LEAST_SECONDS = 0.02  # a step: less is the noise of a machine that does something else, too
LEAST_SYNC_SECONDS = 0.05  # a step: where all is faster than that, the network does what it can

OWN = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
NEVER_WAITING = (Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER)
OF_SCRIPTS = (*NEVER_WAITING, Phase.USER)

Spent = Mapping[int, tuple[float, ...]]  # rank -> seconds in each phase, per step


class Slowness:
    """What has been said of one generation so far, and since when it is measured."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._hosts = hosts
        self._first: dict[int, int] = {}
        self._base: dict[int, Sample] = {}
        self._said: dict[str, float] = {}
        self._before: int | None = None  # who was slow in the last window
        self.rank: int | None = None
        """that the last sentence was about"""

    def see(self, samples: Sequence[Sample]) -> str:
        """A sentence that is new, or empty. To be called with all ranks that run, again and again."""
        if len(samples) < 2 or any(one.phase is Phase.USER and not one.script for one in samples):
            return ""
        for one in samples:
            first = self._first.setdefault(one.rank, one.step)
            if one.step >= first + FIRST_STEPS:
                self._base.setdefault(one.rank, one)
        if any(not self._ripe(one) for one in samples):
            return ""
        spent = {one.rank: _per_step(self._base[one.rank], one) for one in samples}
        self._base = {one.rank: one for one in samples}
        scripts = all(one.script for one in samples)
        found = (slow_script if scripts else slow_rank)(spent, self._hosts)
        before, self._before = self._before, found[0] if found else None
        if scripts and self._before != before:  # some steps of a busy machine, or of a script, are no slow rank
            return ""
        self.rank = self._before
        if found:
            return self._new(f"rank {self.rank}", *found[1:])
        if scripts:  # of which nobody knows what they do for themselves
            return ""
        return self._new("network", *(slow_network(spent) or ("", 0.0)))

    def _ripe(self, one: Sample) -> bool:
        base = self._base.get(one.rank)
        if base is None or one.step < base.step + MIN_STEPS:
            return False
        return sum(one.phase_seconds) - sum(base.phase_seconds) >= MIN_SECONDS

    def _new(self, what: str, words: str, measure: float) -> str:
        if measure <= self._said.get(what, 0.0) * CHANGE_FACTOR:
            return ""
        self._said[what] = measure
        return words


def _per_step(base: Sample, now: Sample) -> tuple[float, ...]:
    steps = now.step - base.step
    return tuple((b - a) / steps for a, b in zip(base.phase_seconds, now.phase_seconds, strict=True))


def slow_rank(spent: Spent, hosts: Mapping[int, str]) -> tuple[int, str, float] | None:
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


def slow_script(spent: Spent, hosts: Mapping[int, str]) -> tuple[int, str, float] | None:
    """The same where phases are seen from outside: a rank is slow in what the others wait for, as long, elsewhere."""
    work = {rank: sum(seconds[phase] for phase in OF_SCRIPTS) for rank, seconds in spent.items()}
    waits = {rank: seconds[Phase.BACKWARD] + seconds[Phase.SYNC] for rank, seconds in spent.items()}
    rank = max(work, key=lambda r: work[r])
    usual, excess = _others(work, rank), work[rank] - _others(work, rank)
    if excess < max(LEAST_SECONDS, (SLOW_FACTOR - 1) * usual) or _others(waits, rank) - waits[rank] < excess / 2:
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
    return median(value for other, value in of.items() if other != rank)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.0f} ms"
