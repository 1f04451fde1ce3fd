"""How far the ranks of `paceline.run` are: rank 0 writes it down, whoever has called them shows one line of it.

A line that is drawn anew, on a terminal and in a notebook; now and then a line of its own elsewhere.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, TextIO

import msgspec

from paceline.runs import writing
from paceline.runs.reading import decode

REPORT_SECONDS = 0.2
PLAIN_SECONDS = 10.0  # between two lines where none can be drawn anew
CELLS = 10


class Report(msgspec.Struct, frozen=True):
    """A pass over the data, after its `step`-th step of `steps`."""

    epoch: int  # from 0
    epochs: int  # 0: nobody has said
    step: int
    steps: int  # 0: nobody knows
    loss: float | None  # None: not finite
    rate: float | None  # samples/s over all ranks; None while warming up
    samples_left: int

    def __str__(self) -> str:
        filled = CELLS * self.step // self.steps if self.steps else 0
        of = f"/{self.epochs}" if self.epochs else ""
        bar = f"/{self.steps}  [{'#' * filled}{'.' * (CELLS - filled)}]" if self.steps else ""
        loss = "not finite" if self.loss is None else f"{self.loss:.4f}"
        fast = speed(self.rate, self.samples_left if self.steps else None)
        return f"epoch {self.epoch + 1}{of}  step {self.step}{bar}  loss {loss}  {fast}"


def speed(rate: float | None, samples_left: int | None) -> str:
    """Samples per second, and the time that is left, if it is known; `rate` is None while warming up."""
    left = f"  {clock_words(samples_left / rate)} left" if rate and samples_left is not None else ""
    return f"{rate:,.0f} samples/s{left}" if rate else "warming up"


def clock_words(seconds: float) -> str:
    """4:05, 3:20:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Reporter:
    """Writes down how far a training is, a few times a second, and at the end of each pass."""

    here: ClassVar[Reporter | None] = None  # this process's; None where nobody looks

    def __init__(self, path: Path) -> None:
        self._path, self._due_seconds = path, -math.inf

    def step(self, step: int, steps: int, report: Callable[[], Report]) -> None:
        """After each step: write a report whole, in the last one's place, if it is time for it or the pass is over.

        A full disk does not end a training.
        """
        if time.monotonic() >= self._due_seconds or step == steps:
            self._due_seconds = time.monotonic() + REPORT_SECONDS
            with suppress(OSError):
                writing.replace(self._path, msgspec.json.encode(report()))


class Bar:
    """Shows what ranks print, and below it how far they are, as a Reporter has written into `path`."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self._path, self._stream = path, stream
        self._live = stream.isatty() or type(stream).__module__.startswith("ipykernel")
        self._line, self._drawn = "", 0  # characters of the line that can be drawn anew
        self._is_line_start, self._is_shown, self._due_seconds = True, True, -math.inf

    def show(self, text: str) -> None:
        """What the ranks have printed: above the line."""
        if not text:
            return
        self._stream.write(f"{self._wiped()}{text}")
        self._is_line_start = text.endswith("\n")
        self._draw()

    def look(self) -> None:
        """Show how far they are, if there is news."""
        with suppress(OSError):  # there is none yet
            line = str(decode(self._path, Report))
            self._line, self._is_shown = line, self._is_shown and line == self._line
        if not self._is_shown:
            self._draw()

    def end(self) -> None:
        """Leave what it shows last."""
        self.look()
        if self._drawn:
            self._stream.write("\n")
        elif not self._is_shown:
            begin = "" if self._is_line_start else "\n"
            self._stream.write(f"{begin}{self._line}\n")
        self._stream.flush()

    def _draw(self) -> None:
        if self._is_line_start and self._line and self._live:  # else a line of the ranks has no end yet
            line = self._line[: shutil.get_terminal_size().columns - 1]
            self._stream.write(f"{self._wiped()}{line}")
            self._drawn, self._is_shown = len(line), True
        elif self._is_line_start and not self._is_shown and time.monotonic() >= self._due_seconds:
            self._stream.write(f"{self._line}\n")
            self._is_shown, self._due_seconds = True, time.monotonic() + PLAIN_SECONDS
        self._stream.flush()

    def _wiped(self) -> str:
        drawn, self._drawn = self._drawn, 0
        return f"\r{' ' * drawn}\r" if drawn else ""
