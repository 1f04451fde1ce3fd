"""`--balance`: ranks of different speeds compute different numbers of virtual ranks.

A run is defined for virtual ranks, so their assignment to ranks changes the time of a step and not its result.
"""

import re
from collections.abc import Sequence

from paceline.errors import UsageError
from paceline.protocol.evidence import Phase, WorkerSample

AUTO = "auto"
MEASURED_PHASES = (Phase.DATA, Phase.FORWARD)  # a rank may wait for others in its backward, but not in these
COMPUTE_PHASES = (*MEASURED_PHASES, Phase.BACKWARD)  # their time grows with the number of virtual ranks
SKIPPED_STEPS = 2  # the first steps of a start compile and fill caches
WINDOW_STEPS, WINDOW_SECONDS = 4, 1.0  # minimum between two measurements
WINDOWS = 4  # successive measurements that must give the same result. A temporary slowdown is shorter
MIN_GAIN = 0.1  # of the time of a step; a new assignment restarts the ranks


def parse_balance(text: str | None) -> tuple[float, ...]:
    if text is None or text == AUTO:
        return ()
    is_ratio = re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]{1,6})?(?::[0-9]{1,6}(?:\.[0-9]{1,6})?)+", text)
    speeds = tuple(float(number) for number in text.split(":")) if is_ratio else (0.0,)
    if not all(speeds):
        raise UsageError(code="balance-invalid", value=text)
    return speeds


def speeds_of_ranks(speeds: Sequence[float], ranks_of_nodes: Sequence[int]) -> tuple[float, ...]:
    ranks, nodes = sum(ranks_of_nodes), len(ranks_of_nodes)
    if len(speeds) not in (ranks, nodes):
        raise UsageError(
            code="balance-count", value=":".join(f"{speed:g}" for speed in speeds), ranks=ranks, nodes=nodes
        )
    if len(speeds) == ranks:
        return tuple(speeds)
    return tuple(speed for speed, count in zip(speeds, ranks_of_nodes, strict=True) for _ in range(count))


def assign_virtual_ranks(virtual_ranks: int, size: int, speeds: Sequence[float] = ()) -> list[range]:
    """The virtual ranks that each of `size` ranks computes.

    They are contiguous, so that they form whole subtrees of a sum. With `speeds`, the slowest rank needs the shortest
    possible time, and every rank computes at least one.

    Example: 8 virtual ranks on 3 ranks are 0-1, 2-4, 5-7; with the speeds 2, 1, 1 they are 0-3, 4-5, 6-7.
    """
    if size > virtual_ranks:
        raise UsageError(code="more-ranks-than-virtual-ranks", world_size=size, virtual_ranks=virtual_ranks)
    if not speeds:
        return [range(rank * virtual_ranks // size, (rank + 1) * virtual_ranks // size) for rank in range(size)]
    counts = [1] * size
    for _ in range(virtual_ranks - size):
        counts[min(range(size), key=lambda rank: (counts[rank] + 1) / speeds[rank])] += 1
    stops = [sum(counts[: rank + 1]) for rank in range(size)]
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


class SpeedMeter:
    """Measures the speed of each rank in a run with `--balance auto`, and finds a better assignment.

    A rank that computes n virtual ranks in t seconds has the speed n / t. One measurement covers some steps. Only if
    several in succession agree that another assignment is faster, the ranks are restarted with it. After each
    restart the number that must agree doubles, so that an unsteady machine cannot restart a run again and again.
    """

    def __init__(self) -> None:
        self.speeds: tuple[float, ...] = ()  # they decide the present assignment; empty: equal
        self._needed = WINDOWS
        self._nodes: Sequence[object] = ()
        self._first: dict[int, int] = {}
        self._start: dict[int, WorkerSample] = {}
        self._measured: list[tuple[float, ...]] = []

    def start(self, nodes: Sequence[object]) -> None:
        if self._nodes != nodes:
            self.speeds, self._needed, self._nodes = (), WINDOWS, nodes
        self._begin()

    def _begin(self) -> None:
        self._first, self._start, self._measured = {}, {}, []

    def update(self, samples: Sequence[WorkerSample]) -> bool:
        """Whether another assignment is faster; then `speeds` has changed. Call it with samples of all ranks."""
        ranks = sorted(samples, key=lambda sample: sample.rank)
        virtual_ranks = ranks[0].virtual_ranks
        if len(ranks) >= virtual_ranks or not self._has_window(ranks):
            return False
        starts, self._start = self._start, {sample.rank: sample for sample in ranks}
        shares = assign_virtual_ranks(virtual_ranks, len(ranks), self.speeds)
        seconds = [_seconds_per_step(starts[sample.rank], sample, MEASURED_PHASES) for sample in ranks]
        if min(seconds) <= 0:  # a rank reports no times, for example of a device: its speed is unknown
            return False
        speeds = tuple(len(share) / spent for share, spent in zip(shares, seconds, strict=True))
        slowest = max(ranks, key=lambda sample: seconds[sample.rank])  # the others wait for it in each step
        step_seconds, compute_seconds = (
            _seconds_per_step(starts[slowest.rank], slowest, phases) for phases in (tuple(Phase), COMPUTE_PHASES)
        )
        if _gain(virtual_ranks, speeds, self.speeds) * compute_seconds / step_seconds < MIN_GAIN:
            self._measured = []
            return False
        self._measured.append(speeds)
        if len(self._measured) < self._needed:
            return False
        means = tuple(sum(measured) / len(self._measured) for measured in zip(*self._measured, strict=True))
        self.speeds, self._needed = means, 2 * self._needed
        return True

    def _has_window(self, ranks: Sequence[WorkerSample]) -> bool:
        if any(sample.rank in self._start and sample.step < self._start[sample.rank].step for sample in ranks):
            self._begin()  # the run was rolled back, or the script has begun another session
        for sample in ranks:
            self._first.setdefault(sample.rank, sample.step)
        if any(sample.step < self._first[sample.rank] + SKIPPED_STEPS for sample in ranks):
            return False
        if not self._start:
            self._start = {sample.rank: sample for sample in ranks}
        return all(
            sample.step >= self._start[sample.rank].step + WINDOW_STEPS
            and sum(sample.phase_seconds) >= sum(self._start[sample.rank].phase_seconds) + WINDOW_SECONDS
            for sample in ranks
        )


def _seconds_per_step(start: WorkerSample, now: WorkerSample, phases: Sequence[Phase]) -> float:
    spent = sum(now.phase_seconds[phase] - start.phase_seconds[phase] for phase in phases)
    return spent / (now.step - start.step)


def _gain(virtual_ranks: int, measured: Sequence[float], assigned: Sequence[float]) -> float:
    """The part of the step time that the assignment by `measured` saves, compared with that by `assigned`."""

    def seconds(speeds: Sequence[float]) -> float:
        shares = assign_virtual_ranks(virtual_ranks, len(measured), speeds)
        return max(len(share) / speed for share, speed in zip(shares, measured, strict=True))

    return 1 - seconds(measured) / seconds(assigned)
