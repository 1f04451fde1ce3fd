"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere. Only rank 0 shows anything."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class Display:
    """Shows progress towards `total_steps`; every `interval` steps a line, or continuously a bar on a terminal."""

    def __init__(self, *, total_steps: int, interval: int, shown: bool) -> None:
        self._console = Console(quiet=not shown, highlight=False, emoji=False, soft_wrap=True)
        self._interval, self._total = interval, total_steps
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=12),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, markup=False)

    def step(self, step: int, *, epoch: int, loss: float, lr: float, rate: float | None, samples_left: int) -> None:
        """After each step: the global loss, the learning rate, samples/s over all ranks (None while warming up)."""
        due = step % self._interval == 0 or step == self._total
        if self._bar is None and not due:
            return
        speed = f"{rate:,.0f} samples/s  {_clock(samples_left / rate)} left" if rate else "warming up"
        if self._bar is not None:  # short: it must fit into 80 columns
            self._bar.update(self._task, completed=step, description=f"epoch {epoch + 1}  loss {loss:.4f}  {speed}")
        else:
            text = f"step {step}/{self._total}  epoch {epoch + 1}  loss {loss:.4f}  lr {lr:.2e}  {speed}"
            self._console.print(text, markup=False)


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
