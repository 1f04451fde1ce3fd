"""Scaling as a table: efficiency for each number of ranks, what is lost to which cause, what is to be expected."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from paceline.bench.compare_table import make_table
from paceline.bench.fit import HeldOut
from paceline.bench.scale_report import Ahead, Lost, Scaled
from paceline.bench.shares import COMPUTE, DATA, EXCHANGE, REST, SMALLER, WAITING, Share

WIDTH = 160  # where there is no terminal
CAUSES = {
    COMPUTE: "compute", SMALLER: "smaller batch", DATA: "data",
    EXCHANGE: "communication", WAITING: "waiting", REST: "rest",
}  # fmt: skip
LOST = ("ranks", "batch each", "samples/s", "step ms", "efficiency", "lost ms")
AHEAD = ("scaling", "ranks", "batch each", "step ms", "samples/s", "efficiency", "on")
NOISE = 0.02  # of the efficiency: less is not worth a word


def print_scaled(scaled: Scaled) -> None:
    """Print everything."""
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False, emoji=False)
    console.print(scaled.what, markup=False)
    for mode in ("weak", "strong"):
        if rows := [lost for lost in scaled.lost if lost.mode == mode]:
            console.print(_lost_table(mode, rows))
            for lost in rows:
                console.print(loss_sentence(lost), markup=False)
    for held in scaled.held:
        console.print(held_words(held), markup=False)
    if scaled.ahead:
        console.print(_ahead_table(scaled.ahead))
    for note in scaled.notes:
        console.print(note, markup=False)


def loss_sentence(lost: Lost) -> str:
    """What most of the loss is."""
    ranks = f"{lost.at.ranks} ranks, {lost.mode}"
    gone = 100 * (1 - lost.efficiency.median)
    if gone < 100 * NOISE:
        return f"{ranks}: nothing to speak of is lost ({gone:.0f} %)"
    first = lost.shares[0]
    return f"{ranks}: {gone:.0f} % is lost, most of it ({first.percent:.0f} %) to {first.cause}{_who(lost)}"


def _who(lost: Lost) -> str:
    """Who is to blame for the largest share, in brackets; empty where nobody knows."""
    cause = lost.shares[0].cause
    if cause == WAITING and lost.slowest is not None:
        return f" (rank {lost.slowest}, in its {lost.slow_phase})"
    turns = f"{lost.crowd:g} threads for each core" if lost.crowd > 1 else ""
    if cause == WAITING:
        return f" (another one each time{turns and '; ' + turns})"
    return f" ({turns})" if cause == COMPUTE and turns else ""


def held_words(held: HeldOut) -> str:
    """How well the model does where it can be checked."""
    return (
        f"model, fitted without {held.at.ranks} ranks: predicts {_ms(held.predicted_seconds)} a step of "
        f"{held.at.batch} samples each there, measured {_ms(held.measured_seconds)}: {100 * held.error:+.0f} %"
    )


def _lost_table(mode: str, rows: Sequence[Lost]) -> Table:
    causes = [cause for cause in CAUSES if any(share.cause == cause for lost in rows for share in lost.shares)]
    what = "as many samples for each rank" if mode == "weak" else "as many samples for all ranks together"
    columns = [*LOST, *(CAUSES[cause] for cause in causes)]
    table = make_table(
        columns, f"{mode} scaling ({what}): ms of each step lost to each cause, and its part of the loss"
    )
    for lost in rows:
        by_cause = {share.cause: share for share in lost.shares}
        told = 1 - lost.efficiency.median >= NOISE  # parts of nothing are no numbers
        cells = [_cell(by_cause.get(cause), percent=told) for cause in causes]
        spread = lost.efficiency
        efficiency = f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"
        numbers = (f"{lost.samples_per_second:,.0f}", f"{lost.step_seconds * 1000:.1f}", efficiency)
        table.add_row(str(lost.at.ranks), str(lost.at.batch), *numbers, f"{lost.lost_seconds * 1000:.1f}", *cells)
    return table


def _cell(share: Share | None, *, percent: bool) -> str:
    if share is None:
        return "-"
    return f"{share.seconds * 1000:.1f}" + (f" ({share.percent:.0f} %)" if percent else "")


def _ahead_table(rows: Sequence[Ahead]) -> Table:
    table = make_table(AHEAD, "EXTRAPOLATED, not measured (the model: docs/scaling.md)")
    for row in rows:
        rate = row.at.ranks * row.at.batch / row.step_seconds
        numbers = (f"{row.step_seconds * 1000:.1f}", f"{rate:,.0f}", f"{row.efficiency:.2f}", row.where)
        table.add_row(row.mode, str(row.at.ranks), str(row.at.batch), *numbers)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
