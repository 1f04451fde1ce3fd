"""Two ways to do the same, lap by lap in turns, and the ratios of their times."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from race.contenders import BASE
from race.figures import Row, ratios, rows_of, write
from race.heats import FIRST_STEPS, Pace, race
from race.starter import Contender
from race.works import WORKS

REAL = ["W1", "W2", "W3", "W3g"]
WAYS = {BASE: "torch", "shared": "shared"}  # of --collectives, by the contender's name


def spread(values: list[float]) -> dict[str, float]:
    """Of the ratios of all rounds."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return {"min": min(values), "lower_quartile": low, "median": middle, "upper_quartile": high, "max": max(values)}


def duel(words: str | None, contender: Callable[[str, str, int], Contender]) -> int:
    """Race both ways of `contender` (name, work, ranks) on each work, as the command line says; the exit code."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORKS, default=REAL)
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, help="of a lap; by default as many as take 1.5 s")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for a quiet machine before a lap")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds of 3 steps: does it work?")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.work, arguments.rounds, arguments.steps, arguments.patience = ["tiny"], 2, 3, 0.0
    rows: list[Row] = []
    about: dict[str, Any] = {
        "machine_was": "waited for until it was quiet" if arguments.patience else "busy with other work",
        "nproc": arguments.nproc,
        "ratios": {},
        "works": {},
    }
    faults: list[str] = []
    for work in arguments.work:
        taking_part = [contender(name, work, arguments.nproc) for name in WAYS]
        outcome = race(taking_part, Pace(arguments.rounds, arguments.steps, arguments.patience))
        faults += [f"{work}, {fault}" for fault in outcome.faults]
        if len(set(outcome.losses.values())) != 1:
            faults.append(f"{work}: losses differ: {outcome.losses}")
        found = rows_of(work, taking_part, outcome)
        rows += found
        about["works"][work] = {
            "steps_a_lap": outcome.steps,
            f"loss_after_{FIRST_STEPS}_steps": outcome.losses,
        }
        if len(found) == len(WAYS) and len(pairs := ratios(found[1], found[0])) > 1:
            about["ratios"][work] = told = {name: round(value, 3) for name, value in spread(pairs).items()}
            base = median(ms for ms in found[0].ms if ms is not None)
            print(f"{work:4} {WORKS[work].title}: {told}, {len(pairs)} rounds, {base:.1f} ms a step over torch")
        if arguments.out:
            write(arguments.out, about, rows)
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0
