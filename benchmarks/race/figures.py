"""From laps to numbers that can be judged, a table to read and a file to keep."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from paceline.train.determinism import hardware_facts
from race.contenders import BASE
from race.heats import Outcome
from race.starter import Contender, Lap

FEWEST_PAIRS = 5  # of quiet laps in one round: with less, nothing was measured


@dataclass(frozen=True)
class Row:
    """One contender at one work: a value for each round, None where the machine was not quiet."""

    work: str
    contender: str
    ranks: int
    samples_a_step: int
    ms: list[float | None]
    user_ms: list[float | None]
    system_ms: list[float | None]
    foreign: list[float | None]
    peak_mb: float
    peak_gpu_mb: float


def rows_of(work: str, contenders: Sequence[Contender], outcome: Outcome) -> list[Row]:
    """The record of one work."""

    def values(laps: Sequence[Lap | None], name: str) -> list[float | None]:
        return [None if lap is None else round(getattr(lap, name), 4) for lap in laps]

    found: list[Row] = []
    for one in contenders:
        laps = outcome.laps.get(one.name)
        if laps is None:
            continue
        peaks = [(lap.peak_mb, lap.peak_gpu_mb) for lap in laps if lap is not None]
        peak_mb, peak_gpu_mb = max(peaks, default=(0.0, 0.0))
        found.append(
            Row(
                work, one.name, one.ranks, one.samples,
                ms=values(laps, "ms"), user_ms=values(laps, "user_ms"), system_ms=values(laps, "system_ms"),
                foreign=values(laps, "foreign"),
                peak_mb=round(peak_mb, 1), peak_gpu_mb=round(peak_gpu_mb, 1),
            )
        )  # fmt: skip
    return found


def ratios(row: Row, base: Row) -> list[float]:
    """How much faster than `base`, samples by samples, round by round where both were quiet."""
    per_sample = base.samples_a_step / row.samples_a_step
    pairs = zip(row.ms, base.ms, strict=True)
    return [theirs / own / per_sample for own, theirs in pairs if own is not None and theirs is not None]


def efficiency(row: Row, alone: Row) -> list[float]:
    """Weak scaling: how long a step takes one rank by itself / all together."""
    pairs = zip(row.ms, alone.ms, strict=True)
    return [one / own for own, one in pairs if own is not None and one is not None]


def lower_quartile(values: Sequence[float]) -> float | None:
    """None: not measured."""
    return quantiles(values, n=4, method="inclusive")[0] if len(values) >= FEWEST_PAIRS else None


def rates(row: Row) -> list[float]:
    """Samples a second over all ranks."""
    return [1000 * row.samples_a_step / ms for ms in row.ms if ms is not None]


def table(rows: Sequence[Row]) -> str:
    """Lines: contenders; for one work."""
    base = next((row for row in rows if row.contender == BASE), None)
    lines = [
        f"{rows[0].work:14} {'samples/s min/median/max':>27} {'x vanilla: quartile, median':>28} "
        f"{'user + system ms/step':>22} {'peak MB':>8} {'laps':>5}"
    ]
    for row in rows:
        found = rates(row)
        if not found:
            lines.append(f"{row.contender:14} was never measured: the machine was not quiet")
            continue
        against = ratios(row, base) if base is not None else []
        quartile = lower_quartile(against)
        speed = " / ".join(f"{value:.0f}" for value in (min(found), median(found), max(found)))
        ratio = f"{'-' if quartile is None else f'{quartile:.2f}'}, {median(against):.2f}" if against else "-"
        user, system = (median([v for v in values if v is not None]) for values in (row.user_ms, row.system_ms))
        lines.append(
            f"{row.contender:14} {speed:>27} {ratio:>28} {f'{user:.1f} + {system:.1f}':>22} {row.peak_mb:8.0f} "
            f"{len(found):>5}"
        )
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Its kind; not its name, nor where anything lies on it."""
    gpu = {"gpu": torch.cuda.get_device_name(0)} if torch.cuda.is_available() else {}
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "python": platform.python_version(),
        **hardware_facts(torch.device("cpu")),
        **gpu,
    }


def write(path: Path, about: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """A line for each row: a change shows as one."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    head = json.dumps({"machine": machine(), **about}, indent=1)
    path.write_text(f'{head[:-2]},\n "rows": [\n{lines}\n]}}\n')


def read(path: Path) -> list[Row]:
    """The rows of a file that `write` has made."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]
