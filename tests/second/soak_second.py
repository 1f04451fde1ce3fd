"""A set of silent faults, pitfalls and clean scripts, written from the README alone: what does paceline report of each?

    python tests/second/soak_second.py --out benchmarks/results/second.md [NAME...]
    python tests/second/soak_second.py --set FOLDER --out FILE                       # another set

The authors had not read the checks. There were eight sets; benchmarks/results/second-*.md have the first run of each.
This folder has scripts of kinds that tests/silent, tests/check and benchmarks/faults do not plant: one for each kind
that was missed or reported falsely in a first run, and five clean scripts of the two newest sets.

A set is a folder with `truth.json`, and its scripts beside it or in `scripts/`. truth.json is a list of
    {"file": "f01_ema.py", "kind": "fault", "nproc": 3, "what": "...", "rank": 2, "line": [34, 44]}
`kind`: a fault (runs under `paceline launch`; its `rank` is to be named), a pitfall (under `--check`), or clean (under
both: nothing is to be said). `line`: one or several that are right; none (null) where no line can be. What is run
already, by FILE.json, is left out. The exit code is 1 if something is missed or said falsely, 2 for a set that is none.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec

HERE = Path(__file__).resolve().parent
MOST_SECONDS = 300
RUNS = {"fault": (False,), "pitfall": (True,), "clean": (False, True)}  # with --check?


class Planted(msgspec.Struct, frozen=True):
    file: str
    kind: Literal["fault", "pitfall", "clean"]
    nproc: Annotated[int, msgspec.Meta(ge=1)]
    what: str
    rank: int | None = None
    line: int | list[int] | None = None

    @property
    def lines(self) -> set[int]:
        """Those of which one is to be named."""
        return {self.line} if isinstance(self.line, int) else {*(self.line or ())}


class Said(msgspec.Struct, frozen=True):
    """What was said of it: `right` is whether it was found, and of a fault its rank; of a clean one, nothing."""

    file: str
    kind: str
    check: bool
    what: str
    right: bool
    line: str  # yes, no; "-": none was named, or none is to be
    code: int
    seconds: float
    told: str


def set_in(folder: Path) -> tuple[Path, list[Planted]]:
    """Where its scripts are, and what is planted in them. ValueError with what is wrong with it."""
    try:
        planted = msgspec.json.decode((folder / "truth.json").read_bytes(), type=list[Planted])
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{folder / 'truth.json'}: {error}") from None
    scripts = folder / "scripts" if (folder / "scripts").is_dir() else folder
    if missing := [one.file for one in planted if not (scripts / one.file).is_file()]:
        raise ValueError(f"{folder}: truth.json names scripts that are not in {scripts}: {', '.join(missing)}")
    if nameless := [one.file for one in planted if one.kind == "fault" and one.rank is None]:
        raise ValueError(f"{folder}: a fault has a rank; without one: {', '.join(nameless)}")
    return scripts, planted


def run(script: Path, nproc: int, *, check: bool, folder: Path) -> tuple[int, float, list[str]]:
    """The exit code, the seconds, and the lines of ours that say something."""
    began = time.monotonic()
    words = ["launch", "--nproc", str(nproc), "--run-dir", str(folder / f"{script.name}-{check}"), *["--check"] * check]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words, str(script)],
        capture_output=True, text=True, timeout=MOST_SECONDS, cwd=folder, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if not line.startswith("[rank ")]
    if check:
        counts = [number for number, line in enumerate(lines) if line.startswith(("WRONG", "COSTS"))]
        told = [" ".join(lines[number : number + 2]) for number in counts]
    else:
        told = [line for line in lines if re.match(r"rank|GUILTY|DIVERGED|NOT FINITE|MISMATCH|STALL", line)]
    return done.returncode, time.monotonic() - began, told


def said_of(one: Planted, script: Path, *, check: bool, folder: Path) -> Said:
    """Run it, and see whether the right rank is named, and the line."""
    try:
        code, seconds, told = run(script, one.nproc, check=check, folder=folder)
    except subprocess.TimeoutExpired:
        code, seconds, told = -1, MOST_SECONDS, ["(it did not end)"]
    text = " ".join(told)
    at = {int(number) for number in re.findall(rf"{re.escape(one.file)}:(\d+)", text)}
    line = "-" if not at or not one.lines else "yes" if at & one.lines else "no"
    if one.kind == "clean":
        right, line = not told and code == 0, "-"
    elif check:
        right = bool(told)
    else:
        right = bool(re.search(rf"GUILTY: rank {one.rank}\b|(^|\s)rank {one.rank}\b[^,]", text))
    return Said(one.file, one.kind, check, one.what, right, line, code, round(seconds, 1), "; ".join(told)[:400])


def markdown(name: str, said: list[Said]) -> str:
    lines = [f"# {name}", "", "| | found | right line, where one was named |", "|---|---|---|"]
    for kind in ("fault", "pitfall"):
        those = [one for one in said if one.kind == kind]
        named = [one.line for one in those if one.line != "-"]
        found = sum(one.right for one in those)
        share = f" ({found / len(those):.0%})" if those else ""
        lines.append(f"| {kind}s | {found} of {len(those)}{share} | {named.count('yes')} of {len(named)} |")
    clean = [one for one in said if one.kind == "clean"]
    lines.append(f"| clean scripts | {sum(not one.right for one in clean)} false findings in {len(clean)} runs | |")
    lines += [
        "",
        "| script | what is wrong | found | line | exit code | seconds | what is said |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in said:
        found = ("silent" if one.right else "FALSE") if one.kind == "clean" else "yes" if one.right else "NO"
        cells = one.file + " --check" * one.check, one.what, found, one.line, one.code, round(one.seconds), one.told
        lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only scripts whose names begin so")
    parser.add_argument("--set", type=Path, default=HERE, metavar="FOLDER", help="by default this folder")
    parser.add_argument("--out", type=Path, required=True, help="FILE.md; FILE.json is written beside it")
    asked = parser.parse_args()
    try:
        scripts, planted = set_in(asked.set.resolve())
    except ValueError as error:
        parser.error(str(error))
    kept = asked.out.with_suffix(".json")
    said = msgspec.json.decode(kept.read_bytes(), type=list[Said]) if kept.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        for one in planted:
            if asked.names and not one.file.startswith(tuple(asked.names)):
                continue
            for check in RUNS[one.kind]:
                if any((known.file, known.check) == (one.file, check) for known in said):
                    continue
                said.append(said_of(one, scripts / one.file, check=check, folder=Path(folder)))
                kept.write_bytes(msgspec.json.format(msgspec.json.encode(said), indent=1) + b"\n")
                asked.out.with_suffix(".md").write_text(text := markdown(asked.set.resolve().name, said))
                print(text.splitlines()[-1], flush=True)
    print(f"{sum(one.right for one in said)} of {len(said)} right")
    return 0 if all(one.right for one in said) else 1


if __name__ == "__main__":
    sys.exit(main())
