"""What does a step of a session cost the host, beside a plain loop, DDP and tuned DDP?

    python benchmarks/step.py --out benchmarks/results/step.json     # quiet machine

The contenders of benchmarks/race/loops/stepped.py take turns, A B C D, B C D A, ... Of each lap the record has the 10th
percentile of the wall time of a step and of the CPU time of its main thread: steps that nobody has interrupted. Ratios
are taken round by round, and their median counts. The plain loop has one rank, also beside two.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from race.contenders import TORCHRUN
from race.figures import machine
from race.heats import Pace, race
from race.starter import HERE, Contender, Lap, Launch
from race.works import WORKS

KINDS = ("ddp", "tuned", "session", "session-tuned", "plain")  # the first one is the base of losses
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def contender(kind: str, work: str, ranks: int) -> Contender:
    ranks = 1 if kind == "plain" else ranks
    script = [str(HERE / "loops" / "stepped.py"), kind, work]
    launcher = [sys.executable] if kind == "plain" else [*TORCHRUN, f"--nproc-per-node={ranks}"]
    return Contender(kind, [Launch([*launcher, *script], ENV)], ranks, ranks * WORKS[work].batch)


def ratios(laps: list[Lap | None], base: list[Lap | None], name: str) -> float | None:
    """The median of base / own over the rounds in which both were quiet: above 1 is faster than the base."""
    pairs = [(a, b) for a, b in zip(laps, base, strict=True) if a is not None and b is not None]
    return round(median(getattr(b, name) / getattr(a, name) for a, b in pairs), 3) if pairs else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORKS, default=["tiny", "W1", "W2"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for a quiet machine before a lap")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 20 steps of the tiny model: does it work?")
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    pace = Pace(2, 20, 0.0) if told.quick else Pace(told.rounds, None, told.patience)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    for work in ["tiny"] if told.quick else told.work:
        for ranks in told.ranks:
            outcome = race([contender(kind, work, ranks) for kind in KINDS], pace)
            faults += [f"{work}, {ranks} ranks, {fault}" for fault in outcome.faults]
            for kind, laps in outcome.laps.items():
                row: dict[str, Any] = {"work": work, "ranks": ranks, "contender": kind}
                for name in ("p10_ms", "p10_cpu_ms"):
                    row[name] = [None if lap is None else round(getattr(lap, name), 4) for lap in laps]
                    for base in ("plain", "ddp", "tuned"):
                        if base in outcome.laps:
                            row[f"{name} x {base}"] = ratios(laps, outcome.laps[base], name)
                rows.append(row)
                shown = {name: value for name, value in row.items() if not isinstance(value, list)}
                print(json.dumps(shown), flush=True)
            if told.out:
                lines = ",\n".join(json.dumps(row) for row in rows)
                about = json.dumps({"commit": commit, "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine()})
                told.out.write_text(f'{about[:-1]},\n "rows": [\n{lines}\n]}}\n')
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
