"""The progress of a run: a bar or plain lines on rank 0, and one line below the output of the ranks for the caller of
`paceline.run`. Without a terminal or notebook that line is printed every few seconds.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self, TextIO

import msgspec

from paceline.runs import writing
from paceline.runs.console import format_hms
from paceline.runs.reading import read_json

WARMUP_STEPS = 5  # allocators, kernel selection and lazy imports make the first steps slow
WINDOW_STEPS = 50
REPORT_SECONDS = 0.2
PLAIN_LINE_INTERVAL_SECONDS = 10.0  # between lines if a line cannot be redrawn
CELLS = 10


class ProgressDisplay:
    """Shows progress towards `total_steps` (0: unknown): every `interval` steps a line, or a bar on a terminal."""

    def __init__(self, *, total_steps: int, interval: int, shown: bool) -> None:
        from rich.console import Console

        self._console = Console(quiet=not shown, highlight=False, emoji=False, soft_wrap=True)
        self._interval, self._total, self._of = interval, total_steps, f"/{total_steps}" if total_steps else ""
        self._bar: Any = None  # rich's, on a terminal only
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("step {task.completed}" + self._of),
                BarColumn(bar_width=12),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=self._total or None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def show_step(
        self, step: int, *, epoch: int, loss: float, lr: float, rate: float | None, samples_left: int | None
    ) -> None:
        """Show a step: the global loss, the learning rate, samples/s over all ranks (None during the warm-up)."""
        if self._bar is not None:  # short: it must fit into 80 columns
            text = f"epoch {epoch + 1}  loss {loss:.4f}  {format_rate(rate, samples_left)}"
            self._bar.update(self._task, completed=step, description=text)
        elif step % self._interval == 0 or step == self._total:
            self.say(
                f"step {step}{self._of}  epoch {epoch + 1}  loss {loss:.4f}  lr {lr:.2e}  "
                f"{format_rate(rate, samples_left)}"
            )


class ThroughputMeter:
    """Samples per second of the global batch over a window of steps, without a warm-up and without pauses.

    It also has the fraction of the step time spent waiting for data. There warm-up steps count only in a short run.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._steps, self._samples, self._paused = clock, 0, 0, 0.0
        self._marks: deque[tuple[float, int]] = deque(maxlen=WINDOW_STEPS + 1)  # (time, samples so far)
        self._first: tuple[float, int] | None = None
        self._warm_up = [0.0, 0.0]  # [seconds of waiting for data, seconds in total]
        self._later = [0.0, 0.0]

    def count_step(self, samples: int, data_seconds: float = 0.0, seconds: float = 0.0) -> None:
        self._steps += 1
        self._samples += samples
        sums = self._warm_up if self._steps <= WARMUP_STEPS else self._later
        sums[0] += data_seconds
        sums[1] += seconds
        if self._steps >= WARMUP_STEPS:
            mark = (self._clock() - self._paused, self._samples)
            self._first = self._first or mark
            self._marks.append(mark)

    def exclude_pause(self, seconds: float) -> None:
        self._paused += seconds

    def recent_rate(self) -> float | None:
        """Samples per second over the last 50 steps; None during the warm-up."""
        return self._rate_since(self._marks[0]) if self._marks else None

    def overall_rate(self) -> float | None:
        """Samples per second since the warm-up; None if the run was shorter."""
        return self._rate_since(self._first) if self._first else None

    def data_fraction(self) -> float | None:
        """The fraction of the time spent waiting for data, in [0, 1]; None before the first step."""
        counted = [self._later] if self._steps > 2 * WARMUP_STEPS else [self._warm_up, self._later]
        data_seconds, seconds = (sum(column) for column in zip(*counted, strict=True))
        return data_seconds / seconds if seconds else None

    def _rate_since(self, start: tuple[float, int]) -> float | None:
        (now, samples), (before, samples_before) = self._marks[-1], start
        return (samples - samples_before) / (now - before) if now > before else None


class ProgressRecord(msgspec.Struct, frozen=True):
    """The progress after `step` of the `steps` of an epoch."""

    epoch: int  # from 0
    epochs: int  # 0: unknown
    step: int
    steps: int  # 0: unknown
    loss: float | None  # None: not finite
    rate: float | None  # samples/s over all ranks; None during the warm-up
    samples_left: int

    def __str__(self) -> str:
        filled = CELLS * self.step // self.steps if self.steps else 0
        total = f"/{self.epochs}" if self.epochs else ""
        bar = f"/{self.steps}  [{'#' * filled}{'.' * (CELLS - filled)}]" if self.steps else ""
        loss = "not finite" if self.loss is None else f"{self.loss:.4f}"
        speed_text = format_rate(self.rate, self.samples_left if self.steps else None)
        return f"epoch {self.epoch + 1}{total}  step {self.step}{bar}  loss {loss}  {speed_text}"


def format_rate(rate: float | None, samples_left: int | None) -> str:
    """The samples per second, and with `samples_left` the remaining time. `rate` is None during the warm-up."""
    remaining = f"  {format_hms(samples_left / rate)} left" if rate and samples_left is not None else ""
    return f"{rate:,.0f} samples/s{remaining}" if rate else "warming up"


class ProgressWriter:
    of_process: ClassVar[ProgressWriter | None] = None  # of this process; None if no caller shows the progress

    def __init__(self, path: Path) -> None:
        self._path, self._due_seconds = path, -math.inf

    def write_step(self, step: int, steps: int, report: Callable[[], ProgressRecord]) -> None:
        """Replace the file, at most every REPORT_SECONDS and at the end of an epoch. A full disk raises no error."""
        if time.monotonic() >= self._due_seconds or step == steps:
            self._due_seconds = time.monotonic() + REPORT_SECONDS
            with suppress(OSError):
                writing.replace_file(self._path, msgspec.json.encode(report()))


class ProgressViewer:
    """Shows the output of the ranks, and below it their progress, which a ProgressWriter writes to `path`."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self._path, self._stream = path, stream
        self._live = stream.isatty() or type(stream).__module__.startswith("ipykernel")
        self._line, self._drawn = "", 0  # characters of the line on the screen
        self._is_line_start, self._is_shown, self._due_seconds = True, True, -math.inf

    def print_above(self, text: str) -> None:
        if not text:
            return
        self._stream.write(f"{self._erase_sequence()}{text}")
        self._is_line_start = text.endswith("\n")
        self._draw()

    def refresh(self) -> None:
        with suppress(OSError):  # the file does not exist yet
            line = str(read_json(self._path, ProgressRecord))
            self._line, self._is_shown = line, self._is_shown and line == self._line
        if not self._is_shown:
            self._draw()

    def end(self) -> None:
        self.refresh()
        if self._drawn:
            self._stream.write("\n")
        elif not self._is_shown:
            begin = "" if self._is_line_start else "\n"
            self._stream.write(f"{begin}{self._line}\n")
        self._stream.flush()

    def _draw(self) -> None:
        if self._is_line_start and self._line and self._live:  # otherwise the last line of the ranks is incomplete
            line = self._line[: shutil.get_terminal_size().columns - 1]
            self._stream.write(f"{self._erase_sequence()}{line}")
            self._drawn, self._is_shown = len(line), True
        elif self._is_line_start and not self._is_shown and time.monotonic() >= self._due_seconds:
            self._stream.write(f"{self._line}\n")
            self._is_shown, self._due_seconds = True, time.monotonic() + PLAIN_LINE_INTERVAL_SECONDS
        self._stream.flush()

    def _erase_sequence(self) -> str:
        drawn, self._drawn = self._drawn, 0
        return f"\r{' ' * drawn}\r" if drawn else ""
