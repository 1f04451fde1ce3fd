"""Faults without any error in scripts nobody changed, one by one: what does paceline say, what torchrun?

    PYTHONPATH=. python tests/silent/soak_silent.py --out benchmarks/results/silent

`make soak-silent`. Each is planted on rank 1 of three, in ddp.py, and in accelerated.py and trainer.py where it makes
sense. Found is what names rank 1 and ends with the documented code (a slow rank, and an exception that was swallowed,
only need to be said); where a line is to be known, it must be the one with the mark. Torchrun runs ddp.py: its exit
code, and whether it named an error. The clean scripts of tests/check/clean are run, too: no word may be
said of them.

Writes FILE.json after each run and FILE.md from it; runs that are in the file already are left out.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.check.planted_cases import kinds
from tests.launch.launch_harness import LAUNCHER

from paceline.runs.attempt import read_notices

HERE = Path(__file__).parent
CLEAN = HERE.parent / "check" / "clean"
SCRIPTS = {"ddp": "DDP", "accelerated": "Accelerate", "trainer": "Trainer"}
NOT_IN_TRAINER = ("an exception before the step, swallowed", "a step left out")  # the Trainer steps, not its user
RANKS, SECONDS = 3, 300
PYTHON = [sys.executable, "-m"]
LAUNCH = [*PYTHON, "paceline", "launch", "--run-dir", "run", "--nproc"]
TORCHRUN = [*PYTHON, "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", "29547"]
LINES = {  # fault -> the mark of the line that is to be told; with replicas that have drifted no line is known
    "nan in the data": "loss", "nan in one batch": "loss", "nan in a closure": "loss", "an infinite loss": "loss",
    "two sums swapped": "sums",
    "an exception in forward, swallowed": "forward",
}  # fmt: skip
CODES = {
    "nan in the data": 5, "nan in one batch": 5, "nan in a closure": 5, "an infinite loss": 5,
    "a gradient that is nan": 5,
    "a gradient set to nan after it was summed": 5, "two sums swapped": 4, "slow data": 0, "slow step": 0,
    "an exception in forward, swallowed": 0,
}  # fmt: skip
OTHERS = 6
MAY_BE_SAID = {("own_folds", "left")}  # of which clean script: once, and it goes on


class Row(NamedTuple):
    script: str
    fault: str
    well: bool  # the right rank, and the documented exit code
    line: str  # yes, no; empty: none is to be known
    code: int
    told: str


def catalogue(script: str) -> list[str]:
    """The faults that can be planted in it."""
    text = (HERE / "plants.py").read_text() + (HERE / f"{script}.py").read_text()
    return [*dict.fromkeys(re.findall(r'(?:has|here)\("([^"]+)"\)', text))]


def started(command: list[str], folder: Path) -> tuple[int, str]:
    """Its exit code, and all that it printed."""
    run = subprocess.run(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    return run.returncode, run.stdout


def marked(script: str, mark: str) -> str:
    """The line with this mark: "ddp.py:45"."""
    lines = (HERE / f"{script}.py").read_text().splitlines()
    return f"{script}.py:{next(n for n, line in enumerate(lines, 1) if line.endswith(f'# told: {mark}'))}"


def forked(words: list[str], ranks: int, folder: Path) -> list[str]:
    """What starts ranks that share one process's imports."""
    argv = [sys.executable, "-P", str(HERE / "preloaded.py"), *words]
    told = {"attempt_dir": str(folder), "argv": argv, "nproc": ranks, "plain_store": True, "preload": True}
    return [sys.executable, "-P", "-c", LAUNCHER, json.dumps(told)]


def planted(script: str, fault: str, steps: int, *, ranks: int = RANKS, fork: bool = False) -> Row:
    """Run a script with a fault on rank 1. Of two ranks that differ neither is named."""
    words = [str(HERE / f"{script}.py"), fault, str(steps)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, said = started(forked(words, ranks, folder) if fork else [*LAUNCH, str(ranks), *words], folder)
    ours = [line.strip() for line in said.splitlines() if not line.startswith("[rank ")]
    told = [line for line in ours if re.search(r"\brank 1\b", line) and "CAUSE" not in line]
    well = code == CODES.get(fault, OTHERS) and bool(told) and (code == 0 or "CAUSE: rank 1 " in said)
    line = ""
    if fault in LINES:
        line = "yes" if any(f"{marked(script, LINES[fault])} in" in one for one in told) else "no"
    return Row(script, fault, well, line, code, (told or ["-"])[0][:200].replace("|", "/"))


def under_torchrun(fault: str, steps: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        code, said = started([*TORCHRUN, str(HERE / "ddp.py"), fault, str(steps)], Path(folder))
    loud = code != 0 or "Error" in said
    return Row("torchrun", fault, loud, "", code, "something" if loud else "nothing")


def clean(script: str) -> Row:
    """A script in which nothing is wrong: it is well if nothing is said."""
    with tempfile.TemporaryDirectory() as folder:
        name, *kind = script.split()
        code, _ = started([*LAUNCH, str(RANKS), str(CLEAN / f"{name}.py"), *kind], Path(folder))
        told = [
            one.words for one in read_notices(Path(folder) / "run" / "attempt-1") if (name, one.kind) not in MAY_BE_SAID
        ]
    return Row("clean", script, not told and code == 0, "", code, "; ".join(told))


def to_do(scripts: list[str]) -> Iterator[tuple[str, str]]:
    for script in scripts:
        if script == "clean":
            yield from (
                (script, f"{path.stem} {kind}".strip()) for path in sorted(CLEAN.glob("*.py")) for kind in kinds(path)
            )
            continue
        left_out = NOT_IN_TRAINER if script == "trainer" else ()
        names = catalogue("ddp" if script == "torchrun" else script)
        yield from ((script, name) for name in names if name not in left_out)


def markdown(rows: list[Row]) -> str:
    of, all_runs = {(one.script, one.fault): one for one in rows}, {*to_do([*SCRIPTS, "torchrun"])}

    def cell(script: str, fault: str) -> str:
        one = of.get((script, fault))
        if one is None:
            return "not run yet" if (script, fault) in all_runs else "-"
        if script == "torchrun":
            return f"{one.code}, {one.told}"
        line = {"yes": ", its line", "no": ", NOT ITS LINE", "": ""}[one.line]
        return f"{'yes' if one.well else 'NO'}{line}" + (f" ({one.code})" if not one.well else "")

    words = []
    for script, name in SCRIPTS.items():
        those = [one for one in rows if one.script == script]
        lines = [one.line for one in those if one.line]
        words.append(
            f"- {name}: {sum(one.well for one in those)} of {len(those)} found, with the right rank and exit code; "
            f"{lines.count('yes')} of {len(lines)} on their line"
        )
    silent = [one for one in rows if one.script == "clean"]
    words.append(f"- {sum(not one.well for one in silent)} false findings in {len(silent)} clean scripts")
    faults = [*dict.fromkeys(one.fault for one in rows if one.script != "clean")]
    table = [
        f"| {fault} | {' | '.join(cell(script, fault) for script in [*SCRIPTS, 'torchrun'])} | "
        f"{next((one.told for one in rows if one.fault == fault and one.script in SCRIPTS), '')} |"
        for fault in faults
    ]
    head = f"| on rank 1 of {RANKS} | {' | '.join(SCRIPTS.values())} | torchrun (DDP): exit code, said | what is said |"
    others = [f"| {one.fault} | {'silent' if one.well else f'FALSE: {one.told}'} | {one.code} |" for one in silent]
    first = ["# Silent faults", "", "`make soak-silent`. -: not planted there.", "", *words, ""]
    table = [head, "|---|---|---|---|---|---|", *table]
    second = ["", "| clean script | what is said | exit code |", "|---|---|---|", *others, ""]
    return "\n".join([*first, *table, *second])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [*SCRIPTS, "torchrun", "clean"]
    parser.add_argument("--scripts", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--run", nargs="+", help="only these faults")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--fork", action="store_true", help="ranks share imports: where there are few cores for three")
    parser.add_argument("--out", type=Path, help="FILE: FILE.json and FILE.md are written")
    asked = parser.parse_args()
    kept = asked.out.with_suffix(".json") if asked.out else None
    rows = [Row(*one) for one in json.loads(kept.read_text())] if kept and kept.exists() else []
    known = {(one.script, one.fault) for one in rows}
    for script, name in to_do(asked.scripts):
        if (script, name) in known or (asked.run and name not in asked.run):
            continue
        if script == "clean":
            rows.append(clean(name))
        elif script == "torchrun":
            rows.append(under_torchrun(name, asked.steps))
        else:
            rows.append(planted(script, name, asked.steps, fork=asked.fork))
        print(*rows[-1], sep=" | ", flush=True)
        if kept:
            kept.write_text("[\n" + ",\n".join(json.dumps(one) for one in rows) + "\n]\n")
            asked.out.with_suffix(".md").write_text(markdown(rows))
    missed = [one for one in rows if one.script != "torchrun" and (not one.well or one.line == "no")]
    print(f"{len(rows)} runs, {len(missed)} not as they should be")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
