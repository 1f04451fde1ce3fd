"""How long would a step take on more ranks? Pure: a model with seven numbers, fitted to measured points.

    step(N, b) = compute + data + exchange + waiting, for N ranks with b samples each, times crowd

    compute    (fixed + per_sample * b) * (1 + contention * (ranks that compute at once - 1))
    data       data_per_sample * b
    exchange   2 (N-1) * latency + 2 (N-1)/N * bytes * seconds_per_byte              a ring's messages and volume
    waiting    jitter * sqrt(2 ln N) * (compute + data)                              the largest of N random deviations
    crowd      ranks * threads / cores of a machine, where there are more threads than cores; else 1

Each number is fitted to its own measured part (see `shares`), by least squares, none below 0. docs/scaling.md says what
the model leaves out. Predictions on more machines take each of them to be as this one is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.network import Network
from paceline.bench.shares import Parts

SMALL_BYTES = 65536  # where one point must tell latency and rate: below this it is latency


@dataclass(frozen=True)
class Machine:
    """What all measured points share."""

    cores: int
    threads: int
    """of each rank"""
    weight_bytes: int
    """what ranks exchange in a step"""

    def crowd(self, ranks: int) -> float:
        """How many threads there are for each core, at least 1."""
        return max(1.0, ranks * self.threads / self.cores)

    def at_once(self, ranks: int) -> int:
        """How many ranks can compute at the same time."""
        return max(1, min(ranks, self.cores // self.threads))


@dataclass(frozen=True)
class Point:
    """A measurement: the mean step on so many ranks with so many samples each."""

    ranks: int
    batch: int
    parts: Parts


@dataclass(frozen=True)
class Model:
    """The seven numbers; seconds."""

    machine: Machine
    fixed: float
    per_sample: float
    data_per_sample: float
    contention: float
    """relative, for each further rank that computes at the same time"""
    latency: float
    seconds_per_byte: float
    jitter: float
    """relative"""

    def compute(self, ranks: int, batch: int) -> float:
        """Without crowd."""
        alone = self.fixed + self.per_sample * batch
        return alone * (1 + self.contention * (self.machine.at_once(ranks) - 1))

    def exchange(self, ranks: int, network: Network | None = None) -> float:
        """Without crowd; over `network` instead of what was measured."""
        latency = self.latency if network is None else network.latency_seconds
        per_byte = self.seconds_per_byte if network is None else 1 / network.bytes_per_second
        return _messages(ranks) * latency + _volume(ranks) * self.machine.weight_bytes * per_byte

    def step(self, ranks: int, batch: int) -> float:
        """Seconds of a step on this machine."""
        return self._step(ranks, batch, ranks, self.exchange(ranks)) * self.machine.crowd(ranks)

    def step_on_many(self, ranks: int, batch: int, per_machine: int, network: Network) -> float:
        """Seconds of a step on machines like this one, each with so many ranks; ranks exchange over `network`."""
        exchange = self.exchange(ranks, network)
        return self._step(ranks, batch, per_machine, exchange) * self.machine.crowd(per_machine)

    def _step(self, ranks: int, batch: int, per_machine: int, exchange: float) -> float:
        work = self.compute(per_machine, batch) + self.data_per_sample * batch
        return work * (1 + self.jitter * _largest(ranks)) + exchange


@dataclass(frozen=True)
class HeldOut:
    """A measured point, predicted from those on fewer ranks."""

    point: Point
    predicted: float

    @property
    def error(self) -> float:
        """Relative; above 0: it was predicted to take longer."""
        return self.predicted / self.point.parts.step - 1


def fit(points: Sequence[Point], machine: Machine) -> Model:
    """The model nearest to `points`, at least one of which is on one rank."""
    one = [point for point in points if point.ranks == 1]
    many = [point for point in points if point.ranks > 1]
    fixed, per_sample = _line([(float(p.batch), p.parts.compute) for p in one])
    crowds = {p.ranks: machine.crowd(p.ranks) for p in points}
    data = [(float(p.batch), p.parts.data / crowds[p.ranks]) for p in points]
    bare = [(p, (fixed + per_sample * p.batch) * crowds[p.ranks]) for p in many]
    contention = [(machine.at_once(p.ranks) - 1.0, p.parts.compute / alone - 1) for p, alone in bare if alone > 0]
    # what one rank already spends there is no exchange: the totals of a world of one
    base = min((p.parts.exchange for p in one), default=0.0)
    spent = [(p, max(0.0, p.parts.exchange - base) / crowds[p.ranks]) for p in many]
    rows = [(_messages(p.ranks), _volume(p.ranks) * machine.weight_bytes, seconds) for p, seconds in spent]
    latency, per_byte = _two(rows, first=machine.weight_bytes < SMALL_BYTES)
    waits = [(_largest(p.ranks) * (p.parts.compute + p.parts.data), p.parts.waiting) for p in many]
    return Model(
        machine, fixed, per_sample, _slope(data), _slope(contention), latency, per_byte, _slope(waits)
    )  # fmt: skip


def hold_out(points: Sequence[Point], machine: Machine) -> list[HeldOut]:
    """The points on most ranks, predicted from all others; empty where these are on fewer than two numbers of ranks."""
    most = max(point.ranks for point in points)
    rest = [point for point in points if point.ranks < most]
    if len({point.ranks for point in rest}) < 2:
        return []
    model = fit(rest, machine)
    return [HeldOut(p, model.step(p.ranks, p.batch)) for p in points if p.ranks == most]


def _messages(ranks: int) -> float:
    return 2.0 * (ranks - 1)


def _volume(ranks: int) -> float:
    return 2.0 * (ranks - 1) / ranks


def _largest(ranks: int) -> float:
    """By how many standard deviations the largest of so many normal numbers exceeds their mean, about."""
    return math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """The line through the origin, not falling."""
    square = sum(x * x for x, _ in points)
    return max(0.0, sum(x * y for x, y in points) / square) if square > 0 else 0.0


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(height at 0, slope), both at least 0; through the origin where all points are at one place."""
    if len({x for x, _ in points}) < 2:
        return 0.0, _slope(points)
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    if slope <= 0:
        return mean_y, 0.0
    height = mean_y - slope * mean_x
    return (height, slope) if height >= 0 else (0.0, _slope(points))


def _two(rows: Sequence[tuple[float, float, float]], *, first: bool) -> tuple[float, float]:
    """(p, q), both at least 0, with p * a + q * b near y for each row (a, b, y).

    Where they cannot be told apart, one of them is 0, and `first` says which is not.
    """
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ay, by = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        p, q = (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
        if p >= 0 and q >= 0:
            return p, q
        first = q < 0
    return (max(0.0, ay / aa) if aa else 0.0, 0.0) if first else (0.0, max(0.0, by / bb) if bb else 0.0)
