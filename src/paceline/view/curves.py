"""Curves of any length in bounded memory: they are thinned as they grow (no torch here)."""

import math
import statistics

import msgspec

MOST_POINTS = 1024  # of a curve
BARS = "▁▂▃▄▅▆▇█"


class Point(msgspec.Struct, frozen=True):
    """A value, and where it stands."""

    where: str  # "12", the line; "train.log:12" where there are several files; "step 12" of a run's events
    value: float
    epoch: float | None = None


class Curve(msgspec.Struct, frozen=True):
    """How a value went: `points` are at most 1024 of `count`, evenly spaced."""

    count: int
    first: Point
    last: Point
    best: Point | None  # None: never finite
    points: list[Point]


class Rate(msgspec.Struct, frozen=True):
    """Throughput: the median, and the extremes."""

    unit: str  # samples/s, steps/s
    source: str
    median: float
    lowest: Point
    highest: Point
    count: int


class Series:
    """A curve as it grows; its best value is the lowest, or the `highest`."""

    def __init__(self, *, highest: bool = False) -> None:
        self.points: list[Point] = []
        self.first: Point | None = None
        self.last: Point | None = None
        self.low: Point | None = None
        self.high: Point | None = None
        self.count, self._every, self._highest = 0, 1, highest

    def add(self, point: Point) -> None:
        """The next value."""
        self.first, self.last = self.first or point, point
        if math.isfinite(point.value):
            self.low = point if self.low is None or point.value < self.low.value else self.low
            self.high = point if self.high is None or point.value > self.high.value else self.high
        if self.count % self._every == 0:
            self.points.append(point)
            if len(self.points) > MOST_POINTS:
                self.points, self._every = self.points[::2], 2 * self._every
        self.count += 1

    def curve(self) -> Curve | None:
        """All of it; None if there is nothing."""
        if self.first is None or self.last is None:
            return None
        return Curve(self.count, self.first, self.last, self.high if self._highest else self.low, self.points)

    def rate(self, unit: str, source: str) -> Rate | None:
        """Its values as a throughput; None if none is a number."""
        values = [point.value for point in self.points if math.isfinite(point.value)]
        if not values or self.low is None or self.high is None:
            return None
        return Rate(unit, source, statistics.median(values), self.low, self.high, self.count)


def _part(value: float, low: float, high: float) -> float:
    """How far up it is, 0 to 1; halved, so that no difference is infinite."""
    return min(1.0, (value / 2 - low / 2) / (high / 2 - low / 2)) if high / 2 > low / 2 else 0.0


def sparkline(curve: Curve, width: int = 60) -> str:
    """A curve in one line of text; the highest two percent look alike, ! is a value that is not finite."""
    points = curve.points
    finite = sorted(point.value for point in points if math.isfinite(point.value))
    if not finite:
        return "!" * min(width, len(points))
    low, high = finite[0], finite[int(0.98 * (len(finite) - 1))]
    line = ""
    for index in range(min(width, len(points))):
        several = points[index * len(points) // width if len(points) > width else index :]
        several = several[: max(1, len(points) // width)]
        if all(math.isfinite(point.value) for point in several):
            part = statistics.fmean(_part(point.value, low, high) for point in several)
            line += BARS[min(7, int(8 * part))]
        else:
            line += "!"
    return line
