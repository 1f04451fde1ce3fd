"""Efficiency of measured runs, what is lost to which cause, and the tables of `paceline scale`."""

from collections.abc import Sequence
from statistics import median

import msgspec
from rich.table import Table

from paceline.bench.compare import Spread, make_table, spread
from paceline.bench.estimate import Estimate, Machine, Points, estimate_table
from paceline.bench.runs import At, Run, Runs
from paceline.bench.shares import (
    COMPUTE,
    WAITING,
    Share,
    StepParts,
    backward_per_forward,
    lost_shares,
    take_apart,
)  # fmt: skip
from paceline.runs.console import table_console

LOST = ("ranks", "batch each", "samples/s", "step ms", "efficiency", "lost ms")
NOISE = 0.02  # of the efficiency: less is not worth a word


class Lost(msgspec.Struct, frozen=True):
    """What so many ranks lose, weak or strong."""

    mode: str
    at: At
    samples_per_second: float
    step_seconds: float
    efficiency: Spread
    lost_seconds: float  # of each step
    shares: list[Share]
    slowest: int | None
    slow_phase: str
    crowd: float  # threads for each core, at least 1


class Scaled(msgspec.Struct, frozen=True):
    """All that is printed or written."""

    what: str
    lost: list[Lost]
    estimates: list[Estimate]
    notes: list[str]


def parts_of(runs: Runs, alone: Runs) -> dict[At, StepParts]:
    """Each point taken apart: the run of its middle round. `alone` are runs without exchange, where there are any."""
    base = next((_middle(found) for at, found in sorted(runs.items()) if at.ranks == 1), None)
    parts: dict[At, StepParts] = {}
    for at, found in runs.items():
        without = _middle(alone[at]) if alone.get(at) else base
        parts[at] = take_apart(_middle(found), backward_per_forward(without) if without and at.ranks > 1 else None)
    return parts


def lost_of(runs: Runs, parts: Points, machine: Machine, mode: str, batch: int) -> list[Lost]:
    """What each number of ranks above 1 loses; `batch` is of each rank (weak), or of all together (strong)."""
    found: list[Lost] = []
    for ranks in sorted({at.ranks for at in runs}):
        at = At(ranks, batch if mode == "weak" else batch // ranks)
        base = At(1, batch)
        if ranks == 1 or at not in runs or base not in runs:
            continue
        work = 1 if mode == "weak" else ranks  # by how much less a rank has to do than one alone
        ratios = [a.step_seconds / work / b.step_seconds for a, b in zip(runs[base], runs[at], strict=True)]
        one, many = parts[base], parts[at]
        shares = lost_shares(one, many, work, parts.get(At(1, at.batch)) if mode == "strong" else None)
        found.append(
            Lost(
                mode,
                at,
                samples_per_second=_middle(runs[at]).samples / many.step,
                step_seconds=many.step,
                efficiency=spread(ratios),
                lost_seconds=many.step - one.step / work,
                shares=shares,
                slowest=many.slowest,
                slow_phase=many.slow_phase,
                crowd=machine.crowd(ranks),
            )
        )
    return found


def _middle(found: Sequence[Run]) -> Run:
    middle = median([run.step_seconds for run in found])
    return min(found, key=lambda run: abs(run.step_seconds - middle))


def print_scaled(scaled: Scaled) -> None:
    """Print everything."""
    console = table_console(160)
    console.print(scaled.what, markup=False)
    for mode in ("weak", "strong"):
        if rows := [lost for lost in scaled.lost if lost.mode == mode]:
            console.print(_lost_table(mode, rows))
            for lost in rows:
                console.print(loss_sentence(lost), markup=False)
    if scaled.estimates:
        console.print(estimate_table(scaled.estimates))
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


def _lost_table(mode: str, rows: Sequence[Lost]) -> Table:
    what = "as many samples for each rank" if mode == "weak" else "as many samples for all ranks together"
    table = make_table(LOST, f"{mode} scaling ({what})")
    for lost in rows:
        spread = lost.efficiency
        efficiency = f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"
        numbers = (f"{lost.samples_per_second:,.0f}", f"{lost.step_seconds * 1000:.1f}", efficiency)
        table.add_row(str(lost.at.ranks), str(lost.at.batch), *numbers, f"{lost.lost_seconds * 1000:.1f}")
    return table
