"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere, and samples per second."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from paceline.runs.bar import speed

WARMUP_STEPS = 5  # allocators, kernel selection and lazy imports make the first steps slow
WINDOW_STEPS = 50


class Display:
    """Shows progress towards `total_steps`, on rank 0 only: every `interval` steps a line, or a bar on a terminal.

    `total_steps` is 0 where nobody knows.
    """

    def __init__(self, *, total_steps: int, interval: int, shown: bool) -> None:
        self._console = Console(quiet=not shown, highlight=False, emoji=False, soft_wrap=True)
        self._interval, self._total, self._of = interval, total_steps, f"/{total_steps}" if total_steps else ""
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
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
        """Print one line."""
        self._console.print(text, markup=False)

    def step(
        self, step: int, *, epoch: int, loss: float, lr: float, rate: float | None, samples_left: int | None
    ) -> None:
        """After each step: the global loss, the learning rate, samples/s over all ranks (None while warming up)."""
        due = step % self._interval == 0 or step == self._total
        if self._bar is None and not due:
            return
        fast = speed(rate, samples_left)
        if self._bar is not None:  # short: it must fit into 80 columns
            self._bar.update(self._task, completed=step, description=f"epoch {epoch + 1}  loss {loss:.4f}  {fast}")
        else:
            text = f"step {step}{self._of}  epoch {epoch + 1}  loss {loss:.4f}  lr {lr:.2e}  {fast}"
            self._console.print(text, markup=False)


class Throughput:
    """Samples per second of the global batch, over a window, after a warm-up.

    Fed once a step; time that is not training (evaluation) is taken out with `pause`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps = 0
        self._paused = 0.0
        self._marks: deque[tuple[float, int]] = deque(maxlen=WINDOW_STEPS + 1)  # (time, samples so far)
        self._samples = 0
        self._first: tuple[float, int] | None = None

    def step(self, samples: int) -> None:
        """A step on `samples` samples, over all ranks, has just ended."""
        self._steps += 1
        self._samples += samples
        if self._steps >= WARMUP_STEPS:
            mark = (self._clock() - self._paused, self._samples)
            self._first = self._first or mark
            self._marks.append(mark)

    def pause(self, seconds: float) -> None:
        """`seconds` since the last step were not spent on training."""
        self._paused += seconds

    def recent(self) -> float | None:
        """Samples per second over the last 50 steps; None during the warm-up."""
        return self._rate(self._marks[0], self._marks[-1]) if len(self._marks) > 1 else None

    def overall(self) -> float | None:
        """Samples per second since the warm-up; None if the run was no longer than that."""
        return self._rate(self._first, self._marks[-1]) if self._first and len(self._marks) > 1 else None

    @staticmethod
    def _rate(start: tuple[float, int], end: tuple[float, int]) -> float | None:
        seconds = end[0] - start[0]
        return (end[1] - start[1]) / seconds if seconds > 0 else None
