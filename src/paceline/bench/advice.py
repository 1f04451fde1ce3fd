"""Recommends a strategy in one sentence, with the numbers that it rests on. Pure."""

from collections.abc import Sequence

from paceline.bench.compare import Row
from paceline.config.strategies import EXACT
from paceline.errors import plural

WORTH = 1.05  # times the speed of one process; less is not worth a second process
EXACT_ENOUGH = 0.9  # of the fastest: so much speed the same bits are worth
FULL = 0.9  # of the memory: more leaves nothing for what a longer run needs


def advise(rows: Sequence[Row], alone: Row | None, room_bytes: int | None) -> str:
    """One sentence.

    Args:
        rows: of several processes, all of one batch size, without the limit.
        alone: the best of one process; None where it could not be measured (it does not fit, say).
        room_bytes: of memory for one rank; None where unknown.
    """
    if not rows:
        if alone is None:
            return "Nothing could be measured: see the reasons above."
        return f"Train on one process: none of the strategies could be measured, it reached {_rate(alone)}."
    whole = [row for row in rows if room_bytes is None or _need(row) <= FULL * room_bytes]
    small = min(rows, key=_need)
    if not whole:
        return (
            f"Use {small.way}: nothing fits into the {_size(room_bytes)} of a rank; it needs least, "
            f"{_size(_need(small))}, at {_rate(small)}. More ranks, a smaller batch or --checkpoint-activations help."
        )
    best = max(whole, key=lambda row: row.rate.median)
    replicated = [row for row in whole if not _is_sharded(row, rows)]
    if not replicated:
        return (
            f"Use {best.way}: only strategies that share out the training's state fit into the "
            f"{_size(room_bytes)} of a rank; it needs {_size(_need(best))}, at {_rate(best)}."
        )
    if alone is not None and best.rate.median < WORTH * alone.rate.median:
        return (
            f"Train on one process: it reaches {_rate(alone)} on "
            f"{plural(alone.threads, 'thread')}; the fastest of {best.world_size} processes, {best.way}, "
            f"reaches {_rate(best)}."
        )
    exact = [row for row in whole if row.strategy in EXACT and row.rate.median >= EXACT_ENOUGH * best.rate.median]
    if exact:
        pick = max(exact, key=lambda row: (not _is_sharded(row, rows), row.rate.median))
        speed = pick.rate.median / best.rate.median
        told = "the fastest" if pick is best else f"{speed:.2f} times the fastest, {best.way} ({_rate(best)})"
        return (
            f"Use {pick.way}: it fits on one device ({_need_of(pick, room_bytes)}), has the same bits at every "
            f"world size, and is {told}, at {_rate(pick)}{_over(pick, alone)}."
        )
    return (
        f"Use {best.way}: it fits on one device ({_need_of(best, room_bytes)}) and is the fastest, at "
        f"{_rate(best)}{_over(best, alone)}."
    )


def _need(row: Row) -> int:
    """What a rank of it needs, in bytes; 0 where nobody knows."""
    return row.memory.needed if row.memory else 0


def _is_sharded(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a rank of it holds clearly less of the state than that of the largest."""
    state = {one.name: one.memory.state if one.memory else 0 for one in rows}
    return state[row.name] < 0.9 * max(state.values())


def _need_of(row: Row, room_bytes: int | None) -> str:
    return _size(_need(row)) + (f" of {_size(room_bytes)}" if room_bytes else "")


def _over(row: Row, alone: Row | None) -> str:
    return "" if alone is None else f", {row.rate.median / alone.rate.median:.2f} times one process"


def _rate(row: Row) -> str:
    return f"{row.rate.median:,.0f} samples/s"


def _size(size: int | None) -> str:
    if size is None:
        return "memory"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
