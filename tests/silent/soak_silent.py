"""Faults without any error in a plain DDP script, one by one: what does paceline say, what torchrun?

`make soak-silent`. Each is planted on rank 1 of three, in tests/silent/ddp.py. Found is what names rank 1 and ends with
the documented code (a slow rank, and an exception that was swallowed, only need to be said); torchrun's column is its
exit code, and whether it named an error. The clean scripts of tests/check/clean are run, too, where they are: each word
about them is a fault.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SCRIPT, CLEAN = HERE / "ddp.py", HERE.parent / "check" / "clean"
RANKS, SECONDS = 3, 240
CODES = {
    "nan in the data": 5, "nan in one batch": 5, "an infinite loss": 5, "a gradient that is nan": 5,
    "a gradient set to nan after it was summed": 5, "two sums swapped": 4, "slow data": 0, "slow step": 0,
    "an exception in forward, swallowed": 0,
}  # fmt: skip
OTHERS = 6


def catalogue() -> list[str]:
    """The names in the script."""
    return [*dict.fromkeys(re.findall(r'(?:has|here)\(\s*"([^"]+)"', SCRIPT.read_text()))]


def started(command: list[str], folder: Path) -> tuple[int, str]:
    """Its exit code, and all that it printed."""
    run = subprocess.run(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        timeout=SECONDS,
    )  # fmt: skip
    return run.returncode, run.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", help="only these faults")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--no-torchrun", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    launch = [sys.executable, "-m", "paceline", "launch", "--nproc", str(RANKS), "--"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    rows: list[str] = []
    found = wrong = 0
    for fault in arguments.run or catalogue():
        words = [str(SCRIPT), fault, str(arguments.steps)]
        with tempfile.TemporaryDirectory() as name:
            code, said = started([*launch, *words], Path(name))
            its, its_words = (-1, "") if arguments.no_torchrun else started([*torchrun, *words], Path(name))
        told = [line.strip() for line in said.splitlines() if re.search(r"\brank 1\b", line) and "GUILTY" not in line]
        right = code == CODES.get(fault, OTHERS) and bool(told) and (code == 0 or "GUILTY: rank 1 " in said)
        found += right
        quiet = "nothing" if its == 0 and "Error" not in its_words else "something"
        theirs = "" if arguments.no_torchrun else f"{its}, {quiet}"
        rows.append(f"| {fault} | {'yes' if right else 'NO'} | {code} | {(told or ['-'])[0][:150]} | {theirs} |")
        print(rows[-1], flush=True)
    for script in sorted(CLEAN.glob("*.py")) if not arguments.run else ():
        with tempfile.TemporaryDirectory() as name:
            code, _ = started([*launch, str(script)], Path(name))
            told = [line for path in Path(name).rglob("notices.jsonl") for line in path.read_text().splitlines()]
        wrong += bool(told) or code != 0
        rows.append(f"| clean: {script.stem} | {'FALSE' if told or code else 'silent'} | {code} | {''.join(told)} | |")
        print(rows[-1], flush=True)
    total = len(arguments.run or catalogue())
    summary = f"{found} of {total} found, with the right rank and exit code; {wrong} false findings in clean scripts."
    print(summary)
    if arguments.out:
        head = "| fault, on rank 1 of 3 | found | exit code | what was said | torchrun: exit code, what it said |\n"
        arguments.out.write_text(
            f"# Silent faults\n\n{summary}\n\n{head}|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    return 0 if found == total and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
