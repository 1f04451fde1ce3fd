"""The ladder measured: for each strategy medians over rounds, ratios within rounds, whose bits it has; two tables."""

from collections.abc import Mapping, Sequence
from statistics import median, quantiles

import msgspec
from rich.table import Table

from paceline.bench.spec import NO_EXCHANGE, Measurement, Memory, NotMeasured
from paceline.errors import plural
from paceline.ladder import EXACT
from paceline.mesh import strategy_on
from paceline.observe.tables import table_console

REFERENCE = "reference"
"""the candidate whose bits all others are compared with: `exact` on one process, with as many virtual ranks"""
SPEED = ("strategy", "processes", "batch", "samples/s", "x one process", "MFU", "CPU ms/step", "waits",
         "first step s", "sent MB/step", "same bits as")  # fmt: skip
USE = ("tokens_per_second", "mfu")
WORDS = ("strategy", "same bits as", "scaling", "on")  # columns of words
MEMORY = ("strategy", "processes", "batch", "weights", "gradients", "optimizer", "activations", "exchange", "peak",
          "process")  # fmt: skip


class Spread(msgspec.Struct, frozen=True):
    """Of the values of all rounds."""

    low: float  # the lower quartile
    median: float
    high: float


class Row(msgspec.Struct, frozen=True):
    """One strategy at one batch size."""

    name: str
    strategy: str
    world_size: int
    threads: int
    batch_size: int
    global_batch: int
    rate: Spread  # samples a second
    ratio: Spread  # to the base line of the same round
    cpu_ms: float  # user and system, of a step, all ranks together
    first_step_seconds: float
    launch_seconds: float
    sent_bytes: float | None
    memory: Memory | None
    bits: str
    mesh: str = ""
    sync_share: float = 0.0  # of a step's time, in [0, 1]: what a rank waits for others
    tokens_per_second: float | None = None
    mfu: float | None = None
    mfu_words: str = ""  # how it was computed, in the first round

    @property
    def way(self) -> str:
        """The strategy, and the mesh that it works on."""
        return strategy_on(self.strategy, self.mesh)


def compared_rows(rounds: Sequence[Sequence[Measurement]], base: str, steps: int) -> list[Row]:
    """One row for each candidate that was measured, in the order of the first round.

    `base` names the candidate that the others are compared with; a chunk has so many `steps`.
    """
    by_name: dict[str, list[Measurement]] = {}
    for chunk in sorted((chunk for found in rounds for chunk in found), key=lambda chunk: chunk.batch_size):
        by_name.setdefault(chunk.name, []).append(chunk)
    bases = {number: chunk.rate for number, found in enumerate(rounds) for chunk in found if chunk.name == base}
    rates = [
        {chunk.name: chunk.rate / bases[number] for chunk in found}
        for number, found in enumerate(rounds)
        if number in bases
    ]
    reference = {one.batch_size: one.digest for found in rounds for one in found if one.name.startswith(REFERENCE)}
    return [
        _row(chunks, [each[name] for each in rates if name in each], reference, steps)
        for name, chunks in by_name.items()
        if not name.startswith(REFERENCE)
    ]


def _row(chunks: Sequence[Measurement], ratios: Sequence[float], reference: Mapping[int, str], steps: int) -> Row:
    first = chunks[0]
    return Row(
        name=first.name,
        strategy=first.strategy,
        world_size=first.world_size,
        threads=first.threads,
        batch_size=first.batch_size,
        global_batch=first.global_batch,
        rate=spread([chunk.rate for chunk in chunks]),
        ratio=spread(ratios or [0.0]),
        cpu_ms=1000 * median(chunk.cpu_seconds / steps for chunk in chunks),
        first_step_seconds=median(chunk.first_step_seconds for chunk in chunks),
        launch_seconds=median(chunk.launch_seconds for chunk in chunks),
        sent_bytes=next((chunk.sent_bytes for chunk in chunks if chunk.sent_bytes is not None), None),
        memory=next((chunk.memory for chunk in chunks if chunk.memory is not None), None),
        bits=bits_of(first, [chunk.digest for chunk in chunks], reference.get(first.batch_size)),
        mesh=first.mesh,
        sync_share=median(chunk.sync_share for chunk in chunks),
        mfu_words=first.mfu_words,
        **{name: median(one.use[name] for one in chunks) for name in USE if all(name in one.use for one in chunks)},
    )


def bits_of(chunk: Measurement, digests: Sequence[str], reference: str | None) -> str:
    """Whose bits these are: by promise, or only as it came out here."""
    if chunk.world_size == 1:
        return "-"
    if chunk.strategy in EXACT:
        broken = reference is not None and any(digest != reference for digest in digests)
        return "BROKEN: not one process's" if broken else "every world size"
    if reference is not None and all(digest == reference for digest in digests):
        return "one process's, here"
    repeated = len(digests) > 1 and len({*digests}) == 1
    return "this world size, here" if repeated else "rounding differs"


def spread(values: Sequence[float]) -> Spread:
    """Quartiles; of one value, that value."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(low, middle, high)


def print_compared(rows: Sequence[Row], failures: Sequence[NotMeasured], advice: str, notes: Sequence[str]) -> None:
    """Print the tables, the failures, what has to be said of them, and the advice last."""
    console = table_console(140)
    speed = make_table(SPEED, "speed: median over rounds (quartiles); batch: of a step, all ranks together")
    for row in rows:
        speed.add_row(*_speed(row))
    for failure in failures:
        speed.add_row(_failed(failure), str(failure.world_size), "", "[bold red]not measured[/]")
    console.print(speed)
    memory = make_table(MEMORY, "memory of a rank, MB; peak: all tensors together; process: libraries, too")
    for row in rows:
        memory.add_row(*_memory(row))
    if any(row.memory for row in rows):
        console.print(memory)
    for failure in failures:
        console.print(f"{_failed(failure)}, batch {failure.batch_size} a rank: {failure.reason}", markup=False)
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
        "?" if row.mfu is None else f"{row.mfu:.1%}",
        f"{row.cpu_ms:.0f}",
        f"{row.sync_share:.0%}",
        f"{row.first_step_seconds:.2f}",
        "?" if row.sent_bytes is None else f"{row.sent_bytes / 1e6:.2f}",
        "-" if row.strategy == NO_EXCHANGE else row.bits,
    ]


def _memory(row: Row) -> list[str]:
    m = row.memory
    held = (m.weights, m.gradients, m.optimizer, m.activations, m.exchange, m.peak, m.rss_peak) if m else (None,) * 7
    return [*_who(row), *(_megabytes(size) for size in held)]


def _who(row: Row) -> list[str]:
    name = f"({NO_EXCHANGE}: the limit)" if row.strategy == NO_EXCHANGE else row.way
    return [name, f"{row.world_size} x {plural(row.threads, 'thread')}", str(row.global_batch)]


def _failed(failure: NotMeasured) -> str:
    return strategy_on(failure.strategy, failure.mesh)


def _megabytes(size: int | None) -> str:
    if size is None:
        return "?"
    return f"{size / 1e6:.1f}" if size < 1e8 else f"{size / 1e6:.0f}"
