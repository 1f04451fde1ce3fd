"""The tables of `paceline compare`: medians over rounds, ratios within rounds, and a recommendation."""

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

import msgspec
from rich.table import Table

from paceline.config.mesh import format_strategy
from paceline.config.strategies import EXACT_STRATEGIES
from paceline.errors import plural
from paceline.lab.measurement import NO_EXCHANGE, FailedMeasurement, Measurement, MemoryUse
from paceline.runs.console import table_console

REFERENCE_PREFIX = "reference"
"""The candidate with the reference bits: `exact` on one process, with the same number of virtual ranks."""
SPEED_COLUMNS = ("strategy", "processes", "batch", "samples/s", "x one process", "MFU", "CPU ms/step", "waits",
         "first step s", "sent MB/step", "same bits as")  # fmt: skip
USE = ("tokens_per_second", "mfu")
TEXT_COLUMNS = ("strategy", "same bits as", "scaling", "on")
MEMORY_COLUMNS = ("strategy", "processes", "batch", "weights", "gradients", "optimizer", "activations", "exchange",
          "peak", "process")  # fmt: skip
MIN_SPEEDUP = 1.05  # over one process, to recommend several processes
MIN_EXACT_SPEED = 0.9  # of the fastest strategy, to recommend `exact`
NOT_MEASURED = "[bold red]not measured[/]"
MAX_MEMORY = 0.9  # of the memory: a longer run needs the rest


class Quartiles(msgspec.Struct, frozen=True):
    """The quartiles of the values of all rounds."""

    low: float
    median: float
    high: float


class StrategyRow(msgspec.Struct, frozen=True):
    """One strategy at one batch size."""

    name: str
    strategy: str
    world_size: int
    threads: int
    batch_size: int
    global_batch: int
    rate: Quartiles  # samples a second
    ratio: Quartiles  # to the baseline of the same round
    cpu_ms: float  # user and system time per step, all ranks together
    first_step_seconds: float
    launch_seconds: float
    sent_bytes: float | None
    memory: MemoryUse | None
    bits: str
    mesh: str = ""
    sync_share: float = 0.0  # fraction of a step, in [0, 1], in which a rank waits for others
    tokens_per_second: float | None = None
    mfu: float | None = None
    mfu_words: str = ""  # how the MFU was computed in the first round

    @property
    def label(self) -> str:
        return format_strategy(self.strategy, self.mesh)

    @property
    def needed_bytes(self) -> int:
        return self.memory.needed_bytes if self.memory else 0


def make_strategy_rows(rounds: Sequence[Sequence[Measurement]], base: str, steps: int) -> list[StrategyRow]:
    """One row for each measured candidate, in the order of the first round. `base`: the name of the baseline."""
    by_name: dict[str, list[Measurement]] = {}
    ratios: dict[str, list[float]] = {}
    for chunks in rounds:
        for chunk in chunks:
            by_name.setdefault(chunk.candidate.name, []).append(chunk)
            for other in chunks:
                if other.candidate.name == base:
                    ratios.setdefault(chunk.candidate.name, []).append(chunk.rate / other.rate)
    references = [chunks[-1] for name, chunks in by_name.items() if name.startswith(REFERENCE_PREFIX)]
    reference = {chunk.candidate.batch_size: chunk.digest for chunk in references}
    return [
        _row(chunks, ratios.get(name, []), reference, steps)
        for name, chunks in sorted(by_name.items(), key=lambda item: item[1][0].candidate.batch_size)
        if not name.startswith(REFERENCE_PREFIX)
    ]


def _row(
    chunks: Sequence[Measurement], ratios: Sequence[float], reference: Mapping[int, str], steps: int
) -> StrategyRow:
    first, candidate = chunks[0], chunks[0].candidate
    fields: dict[str, Any] = {name: getattr(first, name) for name in ("world_size", "global_batch", "mfu_words")}
    fields |= {name: getattr(candidate, name) for name in ("name", "strategy", "threads", "batch_size", "mesh")}
    fields |= {name: median(c.use[name] for c in chunks) for name in USE if all(name in c.use for c in chunks)}
    return StrategyRow(
        **fields,
        rate=quartiles([chunk.rate for chunk in chunks]),
        ratio=quartiles(ratios or [0.0]),
        cpu_ms=1000 * median(chunk.cpu_seconds / steps for chunk in chunks),
        first_step_seconds=median(chunk.first_step_seconds for chunk in chunks),
        launch_seconds=median(chunk.launch_seconds for chunk in chunks),
        sent_bytes=next((chunk.sent_bytes for chunk in chunks if chunk.sent_bytes is not None), None),
        memory=next((chunk.memory for chunk in chunks if chunk.memory is not None), None),
        bits=describe_bit_equality(first, [chunk.digest for chunk in chunks], reference.get(candidate.batch_size)),
        sync_share=median(chunk.sync_share for chunk in chunks),
    )


def describe_bit_equality(chunk: Measurement, digests: Sequence[str], reference: str | None) -> str:
    if chunk.world_size == 1:
        return "-"
    if chunk.candidate.strategy in EXACT_STRATEGIES:
        is_broken = reference is not None and any(digest != reference for digest in digests)
        return "BROKEN: differs from one process" if is_broken else "every world size"
    if reference is not None and all(digest == reference for digest in digests):
        return "one process's, here"
    repeated = len(digests) > 1 and len({*digests}) == 1
    return "this world size, here" if repeated else "rounding differs"


def quartiles(values: Sequence[float]) -> Quartiles:
    if len(values) < 2:
        return Quartiles(values[0], values[0], values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Quartiles(low, middle, high)


def strategy_advice(rows: Sequence[StrategyRow], alone: StrategyRow | None, room_bytes: int | None) -> str:
    """Recommend one of the rows, which have the same batch size and several processes, without NO_EXCHANGE.

    `alone`: the best row of one process; None if it could not be measured. `room_bytes`: the memory for one rank.
    """
    if not rows:
        if alone is None:
            return "Nothing could be measured: see the reasons above."
        return f"Train on one process, which reached {_rate(alone)}: no strategy could be measured."
    fitting = [row for row in rows if room_bytes is None or row.needed_bytes <= MAX_MEMORY * room_bytes]
    if not fitting:
        smallest = min(rows, key=lambda row: row.needed_bytes)
        return (
            f"Use {smallest.label}: no strategy fits into the {_size(room_bytes)} of a rank, and it needs the least, "
            f"{_size(smallest.needed_bytes)}, at {_rate(smallest)}. Use more ranks, a smaller batch or "
            "--checkpoint-activations."
        )
    best = max(fitting, key=lambda row: row.rate.median)
    needed_size = _size(best.needed_bytes)
    if all(_is_sharded(row, rows) for row in fitting):
        return (
            f"Use {best.label}: only strategies that shard the training state fit into the "
            f"{_size(room_bytes)} of a rank; it needs {needed_size}, at {_rate(best)}."
        )
    if alone is not None and best.rate.median < MIN_SPEEDUP * alone.rate.median:
        return (
            f"Train on one process: it reaches {_rate(alone)} on "
            f"{plural(alone.threads, 'thread')}; the fastest of {best.world_size} processes, {best.label}, "
            f"reaches {_rate(best)}."
        )
    fast = [row for row in fitting if row.rate.median >= MIN_EXACT_SPEED * best.rate.median]
    exact = [row for row in fast if row.strategy in EXACT_STRATEGIES]
    pick = max(exact, key=lambda row: (not _is_sharded(row, rows), row.rate.median), default=best)
    fits = f"it fits on one device ({_size(pick.needed_bytes)}{f' of {_size(room_bytes)}' if room_bytes else ''})"
    gain = "" if alone is None else f", {pick.rate.median / alone.rate.median:.2f} times one process"
    if not exact:
        return f"Use {pick.label}: {fits} and is the fastest, at {_rate(pick)}{gain}."
    speed = f"{pick.rate.median / best.rate.median:.2f} times the fastest, {best.label} ({_rate(best)})"
    speed = "the fastest" if pick is best else speed
    return f"Use {pick.label}: {fits}, has the same bits at every world size, and is {speed}, at {_rate(pick)}{gain}."


def _is_sharded(row: StrategyRow, rows: Sequence[StrategyRow]) -> bool:
    state = {other.name: other.memory.state_bytes if other.memory else 0 for other in rows}
    return state[row.name] < 0.9 * max(state.values())


def _rate(row: StrategyRow) -> str:
    return f"{row.rate.median:,.0f} samples/s"


def _size(size: int | None) -> str:
    if size is None:
        return "memory"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def print_comparison(
    rows: Sequence[StrategyRow], failures: Sequence[FailedMeasurement], advice: str, notes: Sequence[str]
) -> None:
    console = table_console(140)
    title = "speed: median over rounds (quartiles); batch: samples per step, all ranks together"
    speed = make_empty_table(SPEED_COLUMNS, title)
    for row in rows:
        speed.add_row(*_speed_cells(row))
    for failure in failures:
        speed.add_row(format_strategy(failure.strategy, failure.mesh), str(failure.world_size), "", NOT_MEASURED)
    console.print(speed)
    title = "memory of a rank, MB; peak: all tensors together; process: including libraries"
    memory = make_empty_table(MEMORY_COLUMNS, title)
    for row in rows:
        sizes = msgspec.structs.astuple(row.memory) if row.memory else [None] * len(MemoryUse.__struct_fields__)
        memory.add_row(*_identity_cells(row), *map(_megabytes, sizes))
    if any(row.memory for row in rows):
        console.print(memory)
    for failure in failures:
        name = format_strategy(failure.strategy, failure.mesh)
        console.print(f"{name}, batch {failure.batch_size} per rank: {failure.reason}", markup=False)
    for note in notes:
        console.print(note, markup=False)
    console.print(advice, markup=False, style="bold")


def make_empty_table(columns: Sequence[str], title: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in TEXT_COLUMNS else "right")
    return table


def _speed_cells(row: StrategyRow) -> list[str]:
    return [
        *_identity_cells(row),
        f"{row.rate.median:,.0f} ({row.rate.low:,.0f}-{row.rate.high:,.0f})",
        f"{row.ratio.median:.2f} ({row.ratio.low:.2f}-{row.ratio.high:.2f})",
        "?" if row.mfu is None else f"{row.mfu:.1%}",
        f"{row.cpu_ms:.0f}",
        f"{row.sync_share:.0%}",
        f"{row.first_step_seconds:.2f}",
        "?" if row.sent_bytes is None else f"{row.sent_bytes / 1e6:.2f}",
        "-" if row.strategy == NO_EXCHANGE else row.bits,
    ]


def _identity_cells(row: StrategyRow) -> list[str]:
    name = f"({NO_EXCHANGE}: the limit)" if row.strategy == NO_EXCHANGE else row.label
    return [name, f"{row.world_size} x {plural(row.threads, 'thread')}", str(row.global_batch)]


def _megabytes(size: int | None) -> str:
    if size is None:
        return "?"
    return f"{size / 1e6:.1f}" if size < 1e8 else f"{size / 1e6:.0f}"
