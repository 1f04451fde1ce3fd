"""How long would a step take on more ranks? Pure: a model with eight numbers, fitted to measured points.

    step(N, b) = crowd * (1 + wait) * (compute + data) + exchange, for N ranks with b samples each

    compute    (fixed + per_sample * b) * (1 + contention * (A - 1)), where A ranks compute at once
    data       data_per_sample * b
    wait       jitter * sqrt(2 ln A): the largest of A random deviations
    exchange   2 (N-1) * latency + 2 (N-1)/N * bytes * seconds_per_byte: over a network, a ring's messages and volume
               crowd * (2 (N-1) * latency + bytes * seconds_per_byte): in memory each rank reads and writes as much,
               however many they are, and its core does it
    crowd      threads per core, at least 1; or that rounded up, or something between (packing)

Where ranks take turns, whoever waits leaves its core to who is late: deviations of more than A ranks do not add up. But
3 ranks on 2 cores take the time of 1.5 ranks on each only if the system moves them within a step; else two of them
share a core to its end, and all take the time of 2. Which of these happens depends on system and task.

Each number is fitted to its own measured part (see `shares`), by least squares, none below 0. docs/scaling.md says what
the model leaves out. Predictions on more machines take each of them to be as this one is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.bench.least_squares import line, slope, two
from paceline.bench.network import Network
from paceline.bench.shares import Parts

UNKNOWN_PACKING = 0.25  # measured for 3 ranks on 2 cores: 0.05 to 0.2 on a quiet machine, up to 0.9 beside other work
SMALL_BYTES = 65536  # where one point must tell latency and rate: below this it is latency


@dataclass(frozen=True)
class Machine:
    """What all measured points share."""

    cores: int
    threads: int
    """of each rank"""
    weight_bytes: int
    """what ranks exchange in a step"""
    over_network: bool = False
    """whether ranks exchange over a network, which is no core's work"""

    def crowd(self, ranks: int) -> float:
        """How many threads there are for each core, at least 1."""
        return max(1.0, ranks * self.threads / self.cores)

    def uneven(self, ranks: int) -> float:
        """How many threads more there are on some cores than on the mean of all, where they do not divide evenly."""
        return math.ceil(self.crowd(ranks) - 1e-9) - self.crowd(ranks)

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
    """The eight numbers; seconds."""

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
    packing: float = UNKNOWN_PACKING
    """0: ranks that do not divide evenly among the cores share them evenly all the same; 1: some cores have one more"""

    def turns(self, ranks: int) -> float:
        """How much longer work takes so many ranks on a machine, because they take turns."""
        return self.machine.crowd(ranks) + self.packing * self.machine.uneven(ranks)

    def compute(self, ranks: int, batch: int) -> float:
        """Without crowd."""
        alone = self.fixed + self.per_sample * batch
        return alone * (1 + self.contention * (self.machine.at_once(ranks) - 1))

    def exchange(self, ranks: int, network: Network | None = None) -> float:
        """As it was measured, or over `network`."""
        if network is not None:
            return self._ring(ranks, network.latency_seconds, 1 / network.bytes_per_second)
        if self.machine.over_network:
            return self._ring(ranks, self.latency, self.seconds_per_byte)
        in_memory = _messages(ranks) * self.latency + self.machine.weight_bytes * self.seconds_per_byte
        return in_memory * self.turns(ranks) if ranks > 1 else 0.0

    def _ring(self, ranks: int, latency: float, per_byte: float) -> float:
        return _messages(ranks) * latency + _volume(ranks) * self.machine.weight_bytes * per_byte

    def step(self, ranks: int, batch: int) -> float:
        """Seconds of a step on this machine."""
        return self._step(ranks, batch, ranks, self.exchange(ranks))

    def step_on_many(self, ranks: int, batch: int, per_machine: int, network: Network) -> float:
        """Seconds of a step on machines like this one, each with so many ranks; ranks exchange over `network`."""
        exchange = self.exchange(ranks, network)
        return self._step(ranks, batch, per_machine, exchange)

    def _step(self, ranks: int, batch: int, per_machine: int, exchange: float) -> float:
        work = self.compute(per_machine, batch) + self.data_per_sample * batch
        at_once = ranks * self.machine.at_once(per_machine) // per_machine
        work *= (1 + self.jitter * _largest(at_once)) * self.turns(per_machine)
        return work + exchange


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
    points = [_without_base(point, points, machine) for point in points]
    many = [point for point in points if point.ranks > 1]
    fixed, per_sample = line([(float(p.batch), p.parts.compute) for p in points if p.ranks == 1])
    data = slope([(float(p.batch), p.parts.data / machine.crowd(p.ranks)) for p in points])
    # in a crowd ranks wait for each other's turns, which is no chance
    calm = [point for point in many if machine.crowd(point.ranks) <= 1]
    waits = [(_largest(p.ranks) * (p.parts.compute + p.parts.data), p.parts.waiting) for p in calm]
    model = Model(machine, fixed, per_sample, data, 0.0, 0.0, 0.0, slope(waits))
    uneven = [point for point in many if machine.uneven(point.ranks) > 0]
    even = [point for point in many if point not in uneven]
    model = replace(model, contention=_contention(model, even or uneven))
    model = replace(model, packing=_packing(model, uneven)) if even and uneven else model
    return _with_exchange(model, many)


def _without_base(point: Point, points: Sequence[Point], machine: Machine) -> Point:
    """What one rank alone spends on exchange is work of every rank: looking whether gradients are finite, say."""
    base = min((p.parts.exchange for p in points if p.ranks == 1), default=0.0)
    moved = min(point.parts.exchange, base * machine.crowd(point.ranks))
    parts = replace(point.parts, compute=point.parts.compute + moved, exchange=max(0.0, point.parts.exchange - moved))
    return replace(point, parts=parts)


def _contention(model: Model, points: Sequence[Point]) -> float:
    """By how much ranks slow each other down, beside taking turns."""
    found: list[tuple[float, float]] = []
    for p in points:
        alone, at_once = model.fixed + model.per_sample * p.batch, model.machine.at_once(p.ranks)
        work = _busy(p) / model.turns(p.ranks) / (1 + model.jitter * _largest(at_once))
        found += [(alone * (at_once - 1), work - model.data_per_sample * p.batch - alone)]
    return slope(found)


def _packing(model: Model, points: Sequence[Point]) -> float:
    """Where between the two ways to share cores unevenly the system is."""
    found: list[tuple[float, float]] = []
    for p in points:
        work = model.compute(p.ranks, p.batch) + model.data_per_sample * p.batch
        work *= 1 + model.jitter * _largest(model.machine.at_once(p.ranks))
        found += [(work * model.machine.uneven(p.ranks), _busy(p) - work * model.machine.crowd(p.ranks))]
    return min(1.0, slope(found))


def _with_exchange(model: Model, points: Sequence[Point]) -> Model:
    """With latency and rate."""
    size, network = model.machine.weight_bytes, model.machine.over_network
    rows = [
        (_messages(p.ranks), (_volume(p.ranks) if network else 1.0) * size,
         p.parts.exchange / (1.0 if network else model.turns(p.ranks)))
        for p in points
    ]  # fmt: skip
    latency, per_byte = two(rows, first=size < SMALL_BYTES)
    return replace(model, latency=latency, seconds_per_byte=per_byte)


def _busy(point: Point) -> float:
    """As long as the slowest rank of each step works."""
    return point.parts.compute + point.parts.data + point.parts.waiting


def hold_out(points: Sequence[Point], machine: Machine) -> list[HeldOut]:
    """The points on each number of ranks above 1, predicted from those on all others.

    Empty where these are on fewer than two numbers of ranks.
    """
    found: list[HeldOut] = []
    for ranks in sorted({point.ranks for point in points} - {1}):
        rest = [point for point in points if point.ranks != ranks]
        if len({point.ranks for point in rest}) > 1:
            model = fit(rest, machine)
            found += [HeldOut(p, model.step(p.ranks, p.batch)) for p in points if p.ranks == ranks]
    return found


def _messages(ranks: int) -> float:
    return 2.0 * (ranks - 1)


def _volume(ranks: int) -> float:
    return 2.0 * (ranks - 1) / ranks


def _largest(ranks: int) -> float:
    """By how many standard deviations the largest of so many normal numbers exceeds their mean, about."""
    return math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0
