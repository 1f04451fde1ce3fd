"""How fast is paceline beside its peers? `python benchmarks/peers.py --out benchmarks/results/peers.json`.

Every contender is a set of processes that lives as long as the run: all stand at a gate before a step, and laps of some
steps go round, A B C, B C A, ..., so that start-up is not in it and a busy machine slows all alike. What each one runs
is what its own tutorial says (benchmarks/race/loops), on the same model, samples, batches and optimizer; after the
first steps all must have the same loss. A lap counts if others had less than 6 % of the processors. Ratios are taken
round by round against torch's DDP and judged by their lower quartile.

The peers: pip install -c constraints.txt -e '.[bench]'. Who is not there is left out, and named.
Four ranks: --nproc 4 --work W3 --out benchmarks/results/peers-4.json. What it all means: benchmarks/summary.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from race.contenders import BASE, LIMITS, MODES, NAMES, PEERS, absent, contender
from race.figures import Row, rows_of, table, write
from race.heats import FIRST_STEPS, Pace, race
from race.works import SMALL, WORKS

REAL = [name for name in WORKS if name not in SMALL]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORKS, help=f"default: {' '.join(REAL)}")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES, help="of paceline")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=tuple(PEERS), help="beside vanilla DDP")
    parser.add_argument("--limits", nargs="*", choices=LIMITS, default=LIMITS)
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for a quiet machine before a lap")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds of 2 steps: does it work?")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pace = Pace(2, 2, 0.0) if arguments.quick else Pace(arguments.rounds, None, arguments.patience)
    asked = [BASE, *arguments.modes, *arguments.peers, *arguments.limits]
    names = [name for name in NAMES if name in asked]
    skipped = {name: why for name in names if (why := absent(name))}
    for name, why in skipped.items():
        print(f"{name} is left out: {why}", file=sys.stderr)

    rows: list[Row] = []
    about: dict[str, Any] = {
        "nproc": arguments.nproc,
        "rounds": pace.rounds,
        "skipped": skipped,
        "versions": {},
        "works": {},
    }
    faults: list[str] = []
    for work in arguments.work or (["tiny"] if arguments.quick else REAL):
        print(f"{work}: {WORKS[work].title}", file=sys.stderr)
        taking_part = [contender(name, work, arguments.nproc) for name in names if name not in skipped]
        outcome = race(taking_part, pace)
        found = rows_of(work, taking_part, outcome)
        rows += found
        faults += [f"{work}, {fault}" for fault in outcome.faults]
        about["versions"] |= outcome.versions
        about["works"][work] = {
            "steps_a_lap": outcome.steps,
            "threads_a_rank": outcome.threads,
            f"loss_after_{FIRST_STEPS}_steps": outcome.losses,
        }
        if found:
            print(table(found), end="\n\n")
        if arguments.out:  # after each work: what was measured is not lost with what comes later
            write(arguments.out, about, rows)
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
