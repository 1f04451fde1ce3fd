"""Fits the model to measured points, each of its numbers to its own part (see `shares`), and holds points out.

Everything is fitted by least squares, and nothing may be below 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from paceline.bench.model import Machine, Model, largest_deviation, ring_messages, ring_volume
from paceline.bench.runs import At
from paceline.bench.shares import StepParts

SMALL_BYTES = 65536  # where one point must give latency or rate: below this it is latency
Points = Mapping[At, StepParts]  # the mean step on so many ranks with so many samples each


class HeldOut(msgspec.Struct, frozen=True):
    """A measured step, predicted from those on other numbers of ranks."""

    at: At
    measured_seconds: float
    predicted_seconds: float
    error: float  # relative; above 0: it was predicted to take longer


def fit_model(points: Points, machine: Machine) -> Model:
    """The model nearest to `points`, at least one of which is on one rank."""
    points = _without_base(points, machine)
    many = {at: parts for at, parts in points.items() if at.ranks > 1}
    fixed, per_sample = _line([(float(at.batch), parts.compute) for at, parts in points.items() if at.ranks == 1])
    data = _slope([(float(at.batch), parts.data / machine.crowd(at.ranks)) for at, parts in points.items()])
    # in a crowd ranks wait for each other's turns, which is no chance
    calm = {at: parts for at, parts in many.items() if machine.crowd(at.ranks) <= 1}
    waits = [(largest_deviation(at.ranks) * (p.compute + p.data), p.waiting) for at, p in calm.items()]
    model = Model(machine, fixed, per_sample, data, 0.0, 0.0, 0.0, _slope(waits))
    uneven = {at: parts for at, parts in many.items() if machine.uneven(at.ranks) > 0}
    even = {at: parts for at, parts in many.items() if at not in uneven}
    model = replace(model, contention=_contention(model, even or uneven))
    model = replace(model, packing=_packing(model, uneven)) if even and uneven else model
    return _with_exchange(model, many)


def _without_base(points: Points, machine: Machine) -> Points:
    """What one rank alone spends on exchange is work of every rank: looking whether gradients are finite, say."""
    base = min((parts.exchange for at, parts in points.items() if at.ranks == 1), default=0.0)
    found: dict[At, StepParts] = {}
    for at, parts in sorted(points.items()):
        moved = min(parts.exchange, base * machine.crowd(at.ranks))
        found[at] = replace(parts, compute=parts.compute + moved, exchange=max(0.0, parts.exchange - moved))
    return found


def _contention(model: Model, points: Points) -> float:
    """By how much ranks slow each other down, beside taking turns."""
    found: list[tuple[float, float]] = []
    for at, parts in points.items():
        alone, at_once = model.fixed + model.per_sample * at.batch, model.machine.at_once(at.ranks)
        work = parts.busy / model.turns(at.ranks) / (1 + model.jitter * largest_deviation(at_once))
        found += [(alone * (at_once - 1), work - model.data_per_sample * at.batch - alone)]
    return _slope(found)


def _packing(model: Model, points: Points) -> float:
    """Where between the two ways to share cores unevenly the system is."""
    found: list[tuple[float, float]] = []
    for at, parts in points.items():
        work = model.compute(at.ranks, at.batch) + model.data_per_sample * at.batch
        work *= 1 + model.jitter * largest_deviation(model.machine.at_once(at.ranks))
        found += [(work * model.machine.uneven(at.ranks), parts.busy - work * model.machine.crowd(at.ranks))]
    return min(1.0, _slope(found))


def _with_exchange(model: Model, points: Points) -> Model:
    size, network = model.machine.weight_bytes, model.machine.over_network
    rows = [
        (ring_messages(at.ranks), (ring_volume(at.ranks) if network else 1.0) * size,
         parts.exchange / (1.0 if network else model.turns(at.ranks)))
        for at, parts in points.items()
    ]  # fmt: skip
    latency, per_byte = _two(rows, first=size < SMALL_BYTES)
    return replace(model, latency=latency, seconds_per_byte=per_byte)


def hold_out(points: Points, machine: Machine) -> list[HeldOut]:
    """The points on each number of ranks above 1, predicted from those on all others.

    Empty where these are on fewer than two numbers of ranks.
    """
    found: list[HeldOut] = []
    for ranks in sorted({at.ranks for at in points} - {1}):
        rest = {at: parts for at, parts in points.items() if at.ranks != ranks}
        if len({at.ranks for at in rest}) > 1:
            model = fit_model(rest, machine)
            for at in sorted(at for at in points if at.ranks == ranks):
                measured, predicted = points[at].step, model.step(at.ranks, at.batch)
                found.append(HeldOut(at, measured, predicted, predicted / measured - 1))
    return found


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """The line through the origin, not falling."""
    square = sum(x * x for x, _ in points)
    return max(0.0, sum(x * y for x, y in points) / square) if square > 0 else 0.0


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(height at 0, slope), both at least 0; through the origin where all points are at one place."""
    if len({x for x, _ in points}) < 2:
        return 0.0, _slope(points)
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    if rise <= 0:
        return mean_y, 0.0
    height = mean_y - rise * mean_x
    return (height, rise) if height >= 0 else (0.0, _slope(points))


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
