"""Numbers as people read them in a line: sizes, shares, times, and a small curve of the last values."""

import math
from collections.abc import Sequence

from paceline.runs.bar import clock_words
from paceline.runs.terminal import clean

BARS = "▁▂▃▄▅▆▇█"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def last_bars(values: Sequence[float], width: int) -> str:
    """The last values, each a bar of one to eight eighths: from the least to the most of them."""
    shown = [value for value in values[-width:] if math.isfinite(value)] if width > 0 else []
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    if not abs(max(shown, key=abs)) * 0.02 < span < math.inf:  # noise is no curve
        return BARS[1] * len(shown)
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in shown)


def size_words(size_bytes: float) -> str:
    """1.5 GiB."""
    value, unit = float(size_bytes), 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {UNITS[unit]}"


def time_words(seconds: float) -> str:
    """3 ms, 1.2 s, 4:05, 3:20:00, 2 d 5 h."""
    if not 0 <= seconds < 1e9:
        return "?"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours = round(seconds) // 3600
    return f"{hours // 24} d {hours % 24} h" if hours >= 48 else clock_words(seconds)


def one_line(text: str, most: int) -> str:
    """Somebody else's words in one line of at most so many characters, without what would steer a terminal."""
    line = " ".join(clean(text[: 4 * most]).split())
    return line if len(line) <= most else f"{line[: max(0, most - 1)]}…"
