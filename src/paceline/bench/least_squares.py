"""Which line lies nearest to measured points, if nothing may be below 0?"""

from __future__ import annotations

from collections.abc import Sequence


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The line through the origin, not falling."""
    square = sum(x * x for x, _ in points)
    return max(0.0, sum(x * y for x, y in points) / square) if square > 0 else 0.0


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(height at 0, slope), both at least 0; through the origin where all points are at one place."""
    if len({x for x, _ in points}) < 2:
        return 0.0, slope(points)
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    if rise <= 0:
        return mean_y, 0.0
    height = mean_y - rise * mean_x
    return (height, rise) if height >= 0 else (0.0, slope(points))


def two(rows: Sequence[tuple[float, float, float]], *, first: bool) -> tuple[float, float]:
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
