"""A second set of silent faults, pitfalls and clean scripts, written from the README alone: what is said of each?

    python tests/second/soak_second.py --out benchmarks/results/second.md

Its author had not read the checks. What was said when they first met is in benchmarks/results/second-first.md. Since
then the set is known: this only shows that nothing gets lost.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MOST_SECONDS = 300
HEAD = "| script | what is wrong | rank | line | exit code | seconds | what is said |\n|---|---|---|---|---|---|---|\n"


def said_of(name: str, nproc: int, *, check: bool, folder: Path) -> tuple[int, float, list[str]]:
    """The exit code, the seconds, and the lines of ours that say something."""
    began = time.monotonic()
    words = ["launch", "--nproc", str(nproc), "--run-dir", str(folder / f"{name}-{check}"), *["--check"] * check]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words, str(HERE / "scripts" / name)],
        capture_output=True, text=True, timeout=MOST_SECONDS, cwd=folder, check=False,
    )  # fmt: skip
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if not line.startswith("[rank ")]
    if check:
        counts = [number for number, line in enumerate(lines) if line.startswith(("WRONG", "COSTS"))]
        told = [" ".join(lines[number : number + 2]) for number in counts]
    else:
        told = [line for line in lines if re.match(r"rank|GUILTY|DIVERGED|NOT FINITE|MISMATCH|STALL", line)]
    return done.returncode, time.monotonic() - began, told


def judged(one: dict[str, Any], told: list[str], *, check: bool) -> tuple[str, str]:
    """Whether the right rank is named, and the line; `-` where there is none to be named."""
    if one["kind"] == "clean":
        return ("silent" if not told else "FALSE"), "-"
    text = " ".join(told)
    accepted = one["line"] if isinstance(one["line"], list) else [one["line"]]
    at = {int(number) for number in re.findall(rf"{re.escape(one['file'])}:(\d+)", text)}
    line = "yes" if at & {*accepted} else "-" if not at else "no"
    if check:
        return ("yes" if told else "NO"), line
    return ("yes" if re.search(rf"GUILTY: rank {one['rank']}\b|^rank {one['rank']}\b", text) else "NO"), line


def main() -> int:
    """Try all, or those whose names begin so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for one in json.loads((HERE / "truth.json").read_text()):
            if asked.names and not one["file"].startswith(tuple(asked.names)):
                continue
            for check in {"fault": (False,), "pitfall": (True,), "clean": (False, True)}[one["kind"]]:
                code, seconds, told = said_of(one["file"], one["nproc"], check=check, folder=Path(folder))
                right, line = judged(one, told, check=check)
                shown = "; ".join(told)[:240].replace("|", "/")
                rows.append(f"| {one['file']} | {one['what']} | {right} | {line} | {code} | {seconds:.0f} | {shown} |")
                print(rows[-1], flush=True)
                asked.out.write_text(f"{HEAD}{chr(10).join(rows)}\n")
    missed = [row for row in rows if "| NO |" in row or "| FALSE |" in row]
    print(f"{len(rows) - len(missed)} of {len(rows)} right")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
