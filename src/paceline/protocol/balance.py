"""`--balance`: ranks of different speeds compute different numbers of virtual ranks.

A run is defined for virtual ranks, so their assignment to ranks changes the time of a step and not its result.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from paceline.errors import UsageError
from paceline.protocol.evidence import Phase, RankSample

AUTO = "auto"
MEASURED_PHASES = (Phase.DATA, Phase.FORWARD)  # a rank may wait for others in its backward, but not in these
COMPUTE_PHASES = (*MEASURED_PHASES, Phase.BACKWARD)  # their time grows with the number of virtual ranks
STEP_PHASES = (*COMPUTE_PHASES, Phase.SYNC, Phase.OPTIMIZER)  # without evaluations and checkpoints between steps
SAMPLE_SECONDS = 0.25  # between two samples of a rank with `--balance auto`
SKIPPED_STEPS = 2  # the first steps of a start compile and fill caches
INTERVAL_STEPS = 2  # minimum of one measurement
WINDOW_STEPS, WINDOW_SECONDS = 14, 3.0  # of all measurements together. A temporary slowdown is shorter
MIN_GAIN = 0.1  # of the time of a step; a new assignment restarts the ranks
STEADY_SECONDS = 600.0  # after this time, the number of an earlier restart no longer counts


def parse_balance(text: str | None) -> tuple[float, ...]:
    if text is None or text == AUTO:
        return ()
    is_ratio = re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]{1,6})?(?::[0-9]{1,6}(?:\.[0-9]{1,6})?)+", text)
    speeds = tuple(float(number) for number in text.split(":")) if is_ratio else (0.0,)
    if not all(speeds):
        raise UsageError(code="balance-invalid", value=text)
    return speeds


def expand_to_rank_speeds(speeds: Sequence[float], ranks_of_nodes: Sequence[int]) -> tuple[float, ...]:
    ranks, nodes = sum(ranks_of_nodes), len(ranks_of_nodes)
    if len(speeds) not in (ranks, nodes):
        raise UsageError(
            code="balance-count", value=":".join(f"{speed:g}" for speed in speeds), ranks=ranks, nodes=nodes
        )
    if len(speeds) == ranks:
        return tuple(speeds)
    return tuple(speed for speed, count in zip(speeds, ranks_of_nodes, strict=True) for _ in range(count))


def assign_virtual_ranks(
    virtual_ranks: int, size: int, speeds: Sequence[float] = (), limits: Sequence[int] = ()
) -> list[range]:
    """The virtual ranks that each of `size` ranks computes.

    They are contiguous, so that they form whole subtrees of a sum. With `speeds`, the slowest rank needs the shortest
    possible time, and every rank computes at least one. With `limits`, each rank computes at most its limit. The sum of
    the limits is at least `virtual_ranks`.

    Example: 8 virtual ranks on 3 ranks are 0-1, 2-4, 5-7; with the speeds 2, 1, 1 they are 0-3, 4-5, 6-7.
    """
    if size > virtual_ranks:
        raise UsageError(code="more-ranks-than-virtual-ranks", world_size=size, virtual_ranks=virtual_ranks)
    if not speeds:
        return [range(rank * virtual_ranks // size, (rank + 1) * virtual_ranks // size) for rank in range(size)]
    counts = [1] * size
    for _ in range(virtual_ranks - size):
        open_ranks = (rank for rank in range(size) if not limits or counts[rank] < limits[rank])
        counts[min(open_ranks, key=lambda rank: (counts[rank] + 1) / speeds[rank])] += 1
    stops = [sum(counts[: rank + 1]) for rank in range(size)]
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


class AutoBalancer:
    """Measures the speed of each rank in a run with `--balance auto`, and finds a better assignment.

    A rank that computes n virtual ranks in t seconds has the speed n / t. A window of steps consists of intervals of a
    few steps. The ranks are restarted with the assignment by their speeds in the median interval, if it is also faster
    by their speeds in the best interval: after a temporary slowdown it is not. After each restart the window is twice
    as long, so that an unsteady machine cannot restart a run again and again. The memory of a rank limits its number.
    """

    def __init__(self) -> None:
        self.speeds: tuple[float, ...] = ()  # the numbers of the present assignment; empty: equal
        self.limited: Mapping[int, tuple[int, int]] = {}
        """By rank, its number by speed and by memory, if the last assignment was not faster only because of memory."""
        self._window_steps = WINDOW_STEPS
        self._nodes: Sequence[object] = ()
        self._begin()

    def start(self, nodes: Sequence[object]) -> None:
        if self._nodes != nodes:
            self.speeds, self._window_steps, self._nodes = (), WINDOW_STEPS, nodes
        self._begin()

    def _begin(self) -> None:
        self._first: dict[int, int] = {}  # rank -> its first step that was seen
        self._bounds: list[Sequence[RankSample]] = []  # of the intervals in the window: samples of all ranks

    def update(self, samples: Sequence[RankSample]) -> bool:
        """Whether another assignment is faster; then `speeds` has changed. Call it with samples of all ranks."""
        ranks = sorted(samples, key=lambda sample: sample.rank)
        if len(ranks) >= ranks[0].virtual_ranks or not self._is_interval_over(ranks):
            return False
        self._bounds.append(ranks)
        steps = WINDOW_STEPS if sum(ranks[0].phase_seconds) > STEADY_SECONDS else self._window_steps
        while len(self._bounds) > 2 and _are_apart(self._bounds[1], ranks, steps, WINDOW_SECONDS):
            del self._bounds[0]
        if not _are_apart(self._bounds[0], ranks, steps, WINDOW_SECONDS) or not (counts := self._faster_counts()):
            return False
        self.speeds, self._window_steps = counts, 2 * steps
        return True

    def _is_interval_over(self, ranks: Sequence[RankSample]) -> bool:
        if self._bounds and any(now.step < before.step for before, now in zip(self._bounds[-1], ranks, strict=True)):
            self._begin()  # the run was rolled back, or the script has begun another session
        for sample in ranks:
            if sample.step:  # 0 until the first step is done, also after a resume
                self._first.setdefault(sample.rank, sample.step)
        if any(sample.step < self._first.get(sample.rank, 0) + SKIPPED_STEPS - 1 for sample in ranks):
            return False
        if not self._bounds:
            self._bounds = [ranks]
        return _are_apart(self._bounds[-1], ranks, INTERVAL_STEPS)

    def _faster_counts(self) -> tuple[int, ...]:
        """The numbers of virtual ranks by the speeds in the window, within memory; empty if they are not faster."""
        start, ranks = self._bounds[0], self._bounds[-1]
        virtual_ranks = ranks[0].virtual_ranks
        shares = assign_virtual_ranks(virtual_ranks, len(ranks), self.speeds)
        of_intervals = zip(*(_work_seconds(*bounds) for bounds in pairwise(self._bounds)), strict=True)
        usual, best = zip(*((median(seconds), min(seconds)) for seconds in of_intervals), strict=True)
        if min(best) <= 0:  # a rank reports no times, for example of a device: its speed is unknown
            return ()
        speeds = tuple(len(share) / seconds for share, seconds in zip(shares, usual, strict=True))
        slowest = usual.index(max(usual))  # the others wait for it in each step
        compute_seconds, step_seconds = (
            _spent(start[slowest], ranks[slowest], phases) for phases in (COMPUTE_PHASES, STEP_PHASES)
        )

        def is_faster(counts: Sequence[int]) -> bool:
            ratios = [new / len(old) for new, old in zip(counts, shares, strict=True)]
            return min(_gain(usual, ratios), _gain(best, ratios)) * compute_seconds / step_seconds >= MIN_GAIN

        # the present numbers fit
        limits = [max(len(s), r.max_virtual_ranks or virtual_ranks) for s, r in zip(shares, ranks, strict=True)]
        by_speed, fitting = (
            tuple(map(len, assign_virtual_ranks(virtual_ranks, len(ranks), speeds, within))) for within in ((), limits)
        )
        if is_faster(fitting):
            return fitting
        if is_faster(by_speed):
            pairs = enumerate(zip(by_speed, limits, strict=True))
            self.limited = {rank: (count, limit) for rank, (count, limit) in pairs if count > limit}
        return ()


def _are_apart(start: Sequence[RankSample], ranks: Sequence[RankSample], steps: int, seconds: float = 0.0) -> bool:
    return all(
        now.step >= before.step + steps and _spent(before, now, STEP_PHASES) >= seconds
        for before, now in zip(start, ranks, strict=True)
    )


def _work_seconds(start: Sequence[RankSample], ranks: Sequence[RankSample]) -> list[float]:
    """The measured seconds per step of each rank."""
    return [
        _spent(before, now, MEASURED_PHASES) / (now.step - before.step)
        for before, now in zip(start, ranks, strict=True)
    ]


def _spent(start: RankSample, now: RankSample, phases: Sequence[Phase]) -> float:
    return sum(now.phase_seconds[phase] - start.phase_seconds[phase] for phase in phases)


def _gain(work: Sequence[float], ratios: Sequence[float]) -> float:
    """The part of the step time that is saved if the work of each rank is multiplied by its ratio."""
    return 1 - max(seconds * ratio for seconds, ratio in zip(work, ratios, strict=True)) / max(work)
