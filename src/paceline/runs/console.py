"""Text for the console: without control sequences, and numbers in readable units (no torch here)."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

BARS = "▁▂▃▄▅▆▇█"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# C0 except tab and newline, C1, marks of direction: the output of a worker must not control the terminal or hide text
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]+")

# the same for bytes, which may be UTF-8, but not tab, newline, return and colours; C1 follows \xc2 in UTF-8
CONTROL_BYTES = re.compile(
    rb"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[(?![0-9;:]*m)[0-?]*[ -/]*[@-~]|\x1b(?!\[[0-9;:]*m).?"
    rb"|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]"
)
INCOMPLETE_SEQUENCE = re.compile(rb"(?:\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?)?|\xc2)\Z")
MAX_SEQUENCE_BYTES = 4096
MAX_NAMES = 24  # in a list


def print_to_stderr(text: str) -> None:
    """Write to stderr without control sequences. Raises no error, because the terminal may be closed."""
    with suppress(OSError):
        data = strip_control_sequences(f"{text}\n".encode(errors="replace"))
        while data:
            data = data[os.write(2, data) :]


def escape_json_control_characters(json: str) -> str:
    return re.sub("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]", lambda m: f"\\u{ord(m[0]):04x}", json)


def remove_control_characters(text: str) -> str:
    return CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def format_timestamp(unix_time: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A time in the local time zone; empty for an invalid number, because a file may have any content."""
    with suppress(OSError, OverflowError, ValueError):
        return time.strftime(form, time.localtime(unix_time)) if unix_time else ""
    return ""


def resolve_carriage_returns(line: str) -> str:
    """The final state of a line: a progress bar returns to its beginning (\\r) and overwrites it."""
    drawn = [part for part in line.split("\r") if part]
    return drawn[-1] if drawn else ""


def strip_control_sequences(data: bytes) -> bytes:
    """`data` without control sequences except colours and \\r. Removes also sequences that a removal creates."""
    while (shorter := CONTROL_BYTES.sub(b"", data)) != data:
        data = shorter
    return data


class ControlSequenceFilter:
    """Filters a stream of bytes for a terminal: text, colours, and \\r, with which progress bars are drawn, pass.

    A sequence may be split between reads. The filter keeps its beginning until it is complete or too long.
    """

    def __init__(self) -> None:
        self._held = b""

    def filter_bytes(self, data: bytes) -> bytes:
        """The part of the input so far that may appear on the terminal."""
        data = self._held + data
        cut = INCOMPLETE_SEQUENCE.search(data)
        self._held = data[cut.start() :] if cut is not None and len(data) - cut.start() < MAX_SEQUENCE_BYTES else b""
        shown = strip_control_sequences(data[: len(data) - len(self._held)])
        if shown.endswith(b"\xc2"):  # a sequence between it and the next byte was removed
            shown, self._held = shown[:-1], b"\xc2" + self._held
        return shown


def table_console(width: int = 132) -> Console:
    """A console for tables, as wide as the terminal, or `width` columns without a terminal."""
    from rich.console import Console

    return Console(width=None if Console().is_terminal else width, highlight=False, emoji=False)


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print text that may have any content: without control sequences and markup, in lines of any length."""
    console.print(remove_control_characters(text), style=style, markup=False, soft_wrap=True)


def sparkline(values: Sequence[float], width: int) -> str:
    shown = [value for value in values[-width:] if math.isfinite(value)] if width > 0 else []
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    if not abs(max(shown, key=abs)) * 0.02 < span < math.inf:  # small noise is drawn flat
        return BARS[1] * len(shown)
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in shown)


def format_size(size_bytes: float) -> str:
    """1.5 GiB."""
    value, unit = float(size_bytes), 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {UNITS[unit]}"


def format_duration(seconds: float) -> str:
    """3 ms, 1.2 s, 4:05, 3:20:00, 2 d 5 h."""
    if not 0 <= seconds < 1e9:
        return "?"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours = round(seconds) // 3600
    return f"{hours // 24} d {hours % 24} h" if hours >= 48 else format_hms(seconds)


def shorten(text: str, most: int) -> str:
    line = " ".join(remove_control_characters(text[: 4 * most]).split())
    return line if len(line) <= most else f"{line[: max(0, most - 1)]}…"


def format_hms(seconds: float) -> str:
    """4:05, 3:20:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


NUMBERED_NAME = re.compile(r"(.*?)([0-9]+)")


def join_ranges(names: Iterable[str], separator: str = ", ") -> str:
    """A list in which three or more consecutive names form a range: "0, 1, 3-7", "n1,n3-n5"."""
    ranges: list[list[str]] = []
    for name in names:
        if ranges and _is_consecutive(ranges[-1][-1], name):
            ranges[-1].append(name)
        else:
            ranges.append([name])
    return separator.join(f"{span[0]}-{span[-1]}" if len(span) > 2 else separator.join(span) for span in ranges)


def _is_consecutive(name: str, following: str) -> bool:
    first, second = NUMBERED_NAME.fullmatch(name), NUMBERED_NAME.fullmatch(following)
    if first is None or second is None or first[1] != second[1]:
        return False
    return second[2] == str(int(first[2]) + 1).zfill(len(first[2]))
