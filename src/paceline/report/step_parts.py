"""Splits a run's mean step into its parts, from the seconds of each rank in each phase. Pure.

In lockstep every step lasts as long as its slowest rank works, plus the exchange itself:

    step = typical work + waiting for the slowest rank + exposed communication + rest

*Work* is data, forward, backward, optimizer and what the loop does between two steps; the *typical* one is the mean of
all ranks but the slowest (the rank that works longest over all steps). *Waiting* is by how much the slowest rank of
each step works longer than that.
*Exposed communication* is what follows in that step, when everybody's work is done. Example, 2 ranks, ms:

    rank 0: data 1, compute 20, sync 14       typical work 21, the slowest works 31: waiting 10 (rank 1, its data)
    rank 1: data 11, compute 20, sync 4       exposed communication 4, the step 35

Strategies that exchange gradients during backward (ddp, bucketed) wait in it. What a backward takes by itself is known
from a run without exchange (or from one rank, in proportion to forward, which never waits): more than that is waiting.
docs/scaling.md says what the shares mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WORK: tuple[str, ...] = ("data", "forward", "backward", "optimizer", "between")
WAITS_IN_BACKWARD = 1.05  # so much longer than it takes by itself; less is noise
ONE_CULPRIT = 0.6  # of the waiting must be one rank's, for it to be named


@dataclass(frozen=True)
class Spent:
    """One rank's seconds in one step."""

    data: float
    forward: float
    backward: float
    sync: float
    optimizer: float
    seconds: float  # of the whole step, and what was between it and the one before
    between: float = 0.0  # what the loop around the step did


@dataclass(frozen=True)
class Run:
    """The steps that all ranks have written down, the warm-up left out."""

    steps: Sequence[Mapping[int, Spent]]  # each by rank
    samples: float  # in a step of the global batch, on average
    hosts: Mapping[int, str]
    on_cpus: bool = True

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return len(self.hosts)

    @property
    def step_seconds(self) -> float:
        """The mean over steps and ranks."""
        total = sum(spent.seconds for step in self.steps for spent in step.values())
        return total / (len(self.steps) * self.world_size)


@dataclass(frozen=True)
class StepParts:
    """The mean step of a run, taken apart; seconds."""

    step: float
    data: float
    compute: float
    waiting: float
    exchange: float
    slowest: int | None = None  # the rank that is waited for, where it is mostly one
    slow_phase: str = ""  # in which it loses most

    @property
    def busy(self) -> float:
        """As long as the slowest rank of each step works."""
        return self.compute + self.data + self.waiting


def between_meetings(phases: Mapping[str, float], seconds: float, between: float, earlier: float) -> Spent:
    """A step from the end of one synchronisation to that of the next, for there all ranks meet.

    So the optimizer is that of the step before, `earlier`: a rank late in it keeps the others waiting in this step.
    `between` are the seconds between the two steps: they belong to training where nothing else was done.
    """
    between = max(0.0, between)  # a clock may be set back
    seconds += between + earlier - phases["optimizer"]
    return Spent(**{**phases, "optimizer": earlier}, seconds=seconds, between=between)


def take_apart(run: Run, backward_per_forward: float | None = None) -> StepParts:
    """The mean step of `run`; how long backward takes by itself, in terms of forward, where that is known."""
    ranks = sorted(run.hosts)
    mean = _means(run, ranks)
    alone = {rank: _backward_alone(mean[rank], backward_per_forward) for rank in ranks}
    own = [{rank: _work(step[rank], alone[rank]) for rank in ranks} for step in run.steps]
    sync = [{rank: step[rank].sync + step[rank].backward - _own_backward(step[rank], alone[rank]) for rank in ranks}
            for step in run.steps]  # fmt: skip
    count = len(run.steps)
    total = {rank: sum(sum(each[rank].values()) for each in own) / count for rank in ranks}
    slowest = max(ranks, key=lambda rank: total[rank])
    others = [rank for rank in ranks if rank != slowest] or ranks
    usual = {p: sum(each[r][p] for each in own for r in others) / count / len(others) for p in WORK}
    longest = sum(max(sum(each[rank].values()) for rank in ranks) for each in own) / count
    blamed = _blamed(own, ranks)
    waiting = longest - sum(usual.values())
    excess = {p: sum(each[slowest][p] for each in own) / count - usual[p] for p in WORK}
    named = len(ranks) > 1 and blamed.get(slowest, 0.0) >= ONE_CULPRIT
    return StepParts(
        step=run.step_seconds,
        data=usual["data"],
        compute=sum(usual[phase] for phase in WORK if phase != "data"),
        waiting=waiting,
        exchange=sum(waits[_longest(work)] for work, waits in zip(own, sync, strict=True)) / count,
        slowest=slowest if named else None,
        slow_phase=max(WORK, key=lambda p: excess[p]) if named else "",
    )


def backward_per_forward(run: Run) -> float:
    """How long a backward takes, in terms of a forward, where it exchanges nothing."""
    mean = _means(run, sorted(run.hosts)).values()
    forward = sum(one["forward"] for one in mean)
    return sum(one["backward"] for one in mean) / forward if forward > 0 else 0.0


def _means(run: Run, ranks: list[int]) -> dict[int, dict[str, float]]:
    steps = run.steps
    return {rank: {p: sum(getattr(step[rank], p) for step in steps) / len(steps) for p in WORK} for rank in ranks}


def _backward_alone(mean: Mapping[str, float], ratio: float | None) -> float | None:
    """How long this rank's backward takes by itself; None where nothing suggests that it waits in it."""
    if ratio is None or mean["backward"] <= WAITS_IN_BACKWARD * ratio * mean["forward"]:
        return None
    return ratio * mean["forward"]


def _own_backward(spent: Spent, alone: float | None) -> float:
    """The part of a backward that is work."""
    return spent.backward if alone is None else min(spent.backward, alone)


def _work(spent: Spent, alone: float | None) -> dict[str, float]:
    return {phase: getattr(spent, phase) for phase in WORK} | {"backward": _own_backward(spent, alone)}


def _longest(work: Mapping[int, Mapping[str, float]]) -> int:
    """The rank that works longest in a step: it comes last, so what it waits for is no other rank's work."""
    return max(work, key=lambda rank: sum(work[rank].values()))


def _blamed(own: list[dict[int, dict[str, float]]], ranks: list[int]) -> dict[int, float]:
    """Which part of all waiting is for which rank, 0..1."""
    blame = dict.fromkeys(ranks, 0.0)
    for each in own:
        work = sorted((sum(each[rank].values()), rank) for rank in ranks)
        longest, rank = work[-1]
        blame[rank] += longest - sum(seconds for seconds, _ in work[:-1]) / max(1, len(work) - 1)
    total = sum(blame.values())
    return {rank: part / total for rank, part in blame.items()} if total > 0 else {}
