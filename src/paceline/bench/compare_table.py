"""The ladder as two tables, speed and memory: one line a strategy, and what to make of it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from paceline.bench.compare_report import Row
from paceline.bench.spec import NO_EXCHANGE, NotMeasured

WIDTH = 140  # where there is no terminal
SPEED = ("strategy", "processes", "batch", "samples/s", "x one process", "CPU ms/step", "first step s", "sent MB/step",
         "same bits as")  # fmt: skip
WORDS = ("strategy", "same bits as", "scaling", "on")  # columns of words
MEMORY = ("strategy", "processes", "batch", "weights", "gradients", "optimizer", "activations", "exchange", "peak",
          "process")  # fmt: skip


def print_compared(rows: Sequence[Row], failures: Sequence[NotMeasured], advice: str, notes: Sequence[str]) -> None:
    """Print the tables, the failures, what has to be said of them, and the advice last."""
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False, emoji=False)
    speed = make_table(SPEED, "speed: median over rounds (quartiles); batch: of a step, all ranks together")
    for row in rows:
        speed.add_row(*_speed(row))
    for failure in failures:
        speed.add_row(failure.strategy, str(failure.world_size), "", "[bold red]not measured[/]")
    console.print(speed)
    memory = make_table(MEMORY, "memory of a rank, MB; peak: all tensors together; process: libraries, too")
    for row in rows:
        memory.add_row(*_memory(row))
    if any(row.memory for row in rows):
        console.print(memory)
    for failure in failures:
        console.print(f"{failure.strategy}, batch {failure.batch_size} a rank: {failure.reason}", markup=False)
    for note in notes:
        console.print(note, markup=False)
    console.print(advice, markup=False, style="bold")


def make_table(columns: Sequence[str], title: str) -> Table:
    """An empty table; numbers stand to the right."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in WORDS else "right")
    return table


def _speed(row: Row) -> list[str]:
    return [
        *_who(row),
        f"{row.rate.median:,.0f} ({row.rate.low:,.0f}-{row.rate.high:,.0f})",
        f"{row.ratio.median:.2f} ({row.ratio.low:.2f}-{row.ratio.high:.2f})",
        f"{row.cpu_ms:.0f}",
        f"{row.first_step_seconds:.2f}",
        "?" if row.sent_bytes is None else f"{row.sent_bytes / 1e6:.2f}",
        "-" if row.strategy == NO_EXCHANGE else row.bits,
    ]


def _memory(row: Row) -> list[str]:
    m = row.memory
    held = (m.weights, m.gradients, m.optimizer, m.activations, m.exchange, m.peak, m.rss_peak) if m else (None,) * 7
    return [*_who(row), *(_megabytes(size) for size in held)]


def _who(row: Row) -> list[str]:
    name = f"({NO_EXCHANGE}: the limit)" if row.strategy == NO_EXCHANGE else row.strategy
    return [name, f"{row.world_size} x {row.threads} thread{'s' if row.threads > 1 else ''}", str(row.global_batch)]


def _megabytes(size: int | None) -> str:
    if size is None:
        return "?"
    return f"{size / 1e6:.1f}" if size < 1e8 else f"{size / 1e6:.0f}"
