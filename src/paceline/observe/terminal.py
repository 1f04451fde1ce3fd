"""What may reach a terminal: words of ours, and of others without what would steer it."""

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress

# C0 but tab and newline, C1, marks of direction: what a worker wrote must not steer the terminal, or hide words
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]+")

# of bytes, which may be UTF-8: all of C0 but tab, newline, return and colours; C1 follows \xc2 there
STEERS = re.compile(
    rb"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[(?![0-9;:]*m)[0-?]*[ -/]*[@-~]|\x1b(?!\[[0-9;:]*m).?"
    rb"|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]"
)
BEGUN = re.compile(rb"(?:\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?)?|\xc2)\Z")
MAX_SEQUENCE_BYTES = 4096
MAX_NAMES = 24  # in a list
NUMBERED = re.compile(r"(.*?)([0-9]+)")


def say(text: str) -> None:
    """Write to stderr, cleaned, for the words may be others'. Never an error: the terminal may be gone."""
    with suppress(OSError):
        data = harmless(f"{text}\n".encode(errors="replace"))
        while data:
            data = data[os.write(2, data) :]


def in_runs(names: Iterable[str], separator: str = ", ") -> str:
    """A list in which three or more names that count up are one: "0, 1, 3-7", "n1,n3-n5"."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return separator.join(f"{run[0]}-{run[-1]}" if len(run) > 2 else separator.join(run) for run in runs)


def _follows(name: str, following: str) -> bool:
    first, second = NUMBERED.fullmatch(name), NUMBERED.fullmatch(following)
    if first is None or second is None or first[1] != second[1]:
        return False
    return second[2] == str(int(first[2]) + 1).zfill(len(first[2]))


def escaped(json: str) -> str:
    """JSON with what could steer a terminal written as JSON writes it."""
    return re.sub("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]", lambda m: f"\\u{ord(m[0]):04x}", json)


def clean(text: str) -> str:
    """`text` without what would steer a terminal."""
    return CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def clock(unix_time: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """When that was, here; empty where no clock shows it: whoever writes a folder can give it any time."""
    with suppress(OSError, OverflowError, ValueError):
        return time.strftime(form, time.localtime(unix_time)) if unix_time else ""
    return ""


def last_drawn(line: str) -> str:
    """What a line shows in the end: a progress bar returns to its beginning (\\r) and draws over it."""
    drawn = [part for part in line.split("\r") if part]
    return drawn[-1] if drawn else ""


def harmless(data: bytes) -> bytes:
    """`data` without what would steer a terminal, but for colours and \\r; nor does what is left come to mean that."""
    while (less := STEERS.sub(b"", data)) != data:
        data = less
    return data


class LiveFilter:
    """What passes of a stream of bytes to a terminal: text, colours, and \\r, by which progress bars are drawn.

    A sequence may be cut between two reads: what may still become one is held back until it is whole, or too long.
    """

    def __init__(self) -> None:
        self._held = b""

    def passed(self, data: bytes) -> bytes:
        """What can be shown of the bytes so far."""
        data = self._held + data
        cut = BEGUN.search(data)
        self._held = data[cut.start() :] if cut is not None and len(data) - cut.start() < MAX_SEQUENCE_BYTES else b""
        shown = harmless(data[: len(data) - len(self._held)])
        if shown.endswith(b"\xc2"):  # what was taken out stood between it and what comes next
            shown, self._held = shown[:-1], b"\xc2" + self._held
        return shown
