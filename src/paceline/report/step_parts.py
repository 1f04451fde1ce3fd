"""Splits a run's mean step into its parts, from the seconds of each rank in each phase. Pure functions.

Ranks run in lockstep. Each step lasts as long as the work of its slowest rank, plus the exchange:

    step = typical work + waiting for the slowest rank + exposed communication + rest

*Work* is data, forward, backward, optimizer and the code between two steps. The *typical* work is the mean of all ranks
except the slowest, which is the rank that works longest over all steps. *Waiting* is the work of the slowest rank of
each step, minus the typical work. *Exposed communication* is the time in that step after all ranks have finished their
work. Example with 2 ranks, in ms:

    rank 0: data 1, compute 20, sync 14       typical work 21, the slowest works 31: waiting 10 (rank 1, its data)
    rank 1: data 11, compute 20, sync 4       exposed communication 4, the step 35

Strategies that exchange gradients during backward (ddp, bucketed) also wait in it. A run without exchange, or a run on
one rank, shows the duration of a backward without waiting, in proportion to forward, which never waits. The rest of a
backward is waiting. docs/scaling.md explains the parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.report.run import PHASES, RankEvents

WORK_PHASES: tuple[str, ...] = ("data", "forward", "backward", "optimizer", "between")
MIN_BACKWARD_WAIT_RATIO = 1.05  # ratio to a backward without waiting; less is noise
MIN_SINGLE_CAUSE_FRACTION = 0.6  # minimum fraction of all waiting that one rank must cause, to be reported


@dataclass(frozen=True)
class PhaseSeconds:
    """One rank's seconds in one step."""

    data: float
    forward: float
    backward: float
    sync: float
    optimizer: float
    seconds: float  # of the whole step, including the time since the step before
    between: float = 0.0  # between the step before and this one


@dataclass(frozen=True)
class RecordedSteps:
    steps: Sequence[Mapping[int, PhaseSeconds]]  # each by rank
    mean_global_batch: float  # mean size of the global batch
    hosts: Mapping[int, str]
    on_cpus: bool = True

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def mean_step_seconds(self) -> float:
        total = sum(spent.seconds for step in self.steps for spent in step.values())
        return total / (len(self.steps) * self.world_size)


@dataclass(frozen=True)
class StepParts:
    step: float
    data: float
    compute: float
    waiting: float
    exchange: float
    slowest: int | None = None  # the rank for which others wait, if it is mostly the same
    slow_phase: str = ""  # in which it loses the most time
    wait_seconds: dict[int, dict[int, float]] = field(default_factory=dict[int, dict[int, float]])
    """Seconds in all steps, by the rank that waited and the slowest rank of the step, for which it waited."""


def rows_by_common_step(logs: Sequence[RankEvents], after: int) -> dict[int, list[int]]:
    rows = [{log.steps.step[row]: row for row in log.valid_rows if log.steps.step[row] > after} for log in logs]
    return {step: [of[step] for of in rows] for step in sorted(set(rows[0]).intersection(*rows[1:]))}


def phase_seconds_by_rank(logs: Sequence[RankEvents], rows: Sequence[int]) -> dict[int, PhaseSeconds]:
    return {log.rank: _phase_seconds(log, row) for log, row in zip(logs, rows, strict=True)}


def _phase_seconds(log: RankEvents, row: int) -> PhaseSeconds:
    """The seconds from the end of one synchronisation to the end of the next, which all ranks reach together.

    The interval has the optimizer of the step before: a rank that is late in it delays the others in this step. The
    seconds between the two steps belong to training if the loop did nothing else.
    """
    steps, seconds = log.steps, log.steps.seconds[row]
    phases = {name: column[row] for name, column in zip(PHASES, steps.phases, strict=True)}
    if not row or not steps.follows[row]:
        return PhaseSeconds(**phases, seconds=seconds)
    between = max(0.0, steps.ended[row] - steps.ended[row - 1] - seconds)  # negative if a clock was set back
    earlier = steps.phases[-1][row - 1]
    seconds += between + earlier - phases["optimizer"]
    return PhaseSeconds(**{**phases, "optimizer": earlier}, seconds=seconds, between=between)


def split_step_time(run: RecordedSteps, backward_to_forward_ratio: float | None = None) -> StepParts:
    """Split the mean step of `run`. The ratio is that of a backward without waiting to a forward; None if unknown."""
    ranks = sorted(run.hosts)
    mean = _means(run, ranks)
    alone = {rank: _unwaited_backward_seconds(mean[rank], backward_to_forward_ratio) for rank in ranks}
    work = [{rank: _work(step[rank], alone[rank]) for rank in ranks} for step in run.steps]
    sync = [{rank: step[rank].sync + step[rank].backward - _backward_work(step[rank], alone[rank]) for rank in ranks}
            for step in run.steps]  # fmt: skip
    count = len(run.steps)
    totals = [{rank: sum(phases.values()) for rank, phases in step.items()} for step in work]
    slowest = max(ranks, key=lambda rank: sum(total[rank] for total in totals))
    others = [rank for rank in ranks if rank != slowest] or ranks
    usual = {p: sum(step[r][p] for step in work for r in others) / count / len(others) for p in WORK_PHASES}
    excess = {p: sum(step[slowest][p] for step in work) / count - usual[p] for p in WORK_PHASES}
    waits = _wait_seconds(totals)
    waited = sum(sum(waits_of.values()) for waits_of in waits.values())
    caused = sum(waits_of.get(slowest, 0.0) for waits_of in waits.values())
    is_cause = caused > 0 and caused >= MIN_SINGLE_CAUSE_FRACTION * waited
    return StepParts(
        step=run.mean_step_seconds,
        data=usual["data"],
        compute=sum(usual[phase] for phase in WORK_PHASES if phase != "data"),
        waiting=sum(max(total.values()) for total in totals) / count - sum(usual.values()),
        exchange=sum(step[_slowest_rank(total)] for total, step in zip(totals, sync, strict=True)) / count,
        slowest=slowest if is_cause else None,
        slow_phase=max(WORK_PHASES, key=lambda p: excess[p]) if is_cause else "",
        wait_seconds=waits,
    )


def backward_to_forward_ratio(run: RecordedSteps) -> float:
    means = _means(run, sorted(run.hosts)).values()
    forward = sum(rank_means["forward"] for rank_means in means)
    return sum(rank_means["backward"] for rank_means in means) / forward if forward > 0 else 0.0


def _means(run: RecordedSteps, ranks: list[int]) -> dict[int, dict[str, float]]:
    steps = run.steps
    return {
        rank: {p: sum(getattr(step[rank], p) for step in steps) / len(steps) for p in WORK_PHASES} for rank in ranks
    }


def _unwaited_backward_seconds(mean: Mapping[str, float], ratio: float | None) -> float | None:
    """Seconds of this rank's backward without waiting; None if nothing suggests that the rank waits in it."""
    if ratio is None or mean["backward"] <= MIN_BACKWARD_WAIT_RATIO * ratio * mean["forward"]:
        return None
    return ratio * mean["forward"]


def _backward_work(spent: PhaseSeconds, alone: float | None) -> float:
    return spent.backward if alone is None else min(spent.backward, alone)


def _work(spent: PhaseSeconds, alone: float | None) -> dict[str, float]:
    return {phase: getattr(spent, phase) for phase in WORK_PHASES} | {"backward": _backward_work(spent, alone)}


def _slowest_rank(work: Mapping[int, float]) -> int:
    """The rank that works longest in a step. It synchronises last, so it does not wait for the work of other ranks."""
    return max(work, key=lambda rank: work[rank])


def _wait_seconds(work: Sequence[Mapping[int, float]]) -> dict[int, dict[int, float]]:
    waits: dict[int, dict[int, float]] = {}
    for step in work:
        slowest = _slowest_rank(step)
        for rank, seconds in step.items():
            if rank != slowest:
                waits_of = waits.setdefault(rank, {})
                waits_of[slowest] = waits_of.get(slowest, 0.0) + step[slowest] - seconds
    return waits
