"""The frameworks people use, as they are: a hang on rank 1 in their user's own code, and their own test scripts.

    PYTHONPATH=. python tests/frameworks/soak_frameworks.py --out benchmarks/results/frameworks

Each script of this folder hangs in its collate function, in a callback, in its step, and not at all; under `paceline
launch`, and under torchrun with `paceline watchover`. The diagnosis must name rank 1 and
the line with the mark, in the user's file. Accelerate's own scripts must end as they do under torchrun.

Writes FILE.json after each run and FILE.md from it; runs that are in the file already are left out. The exit code is 1
if something is not as it should be.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.setups import Popen, Ran, run_command

from paceline.guard.report import read_diagnosis

HERE = Path(__file__).parent
SCRIPTS = {"trainer": "transformers", "accelerated": "accelerate", "lit": "lightning", "ignited": "ignite"}
WHERE = ("collate", "callback", "step")
OWN_TESTS = ("test_script", "test_sync", "test_ops")  # of accelerate.test_utils.scripts
PYTHON = (sys.executable, "-m")
TORCHRUN = (*PYTHON, "torch.distributed.run", "--nproc-per-node=2", "--master-port=29541")
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "launch": (*PYTHON, "paceline", "launch", "--nproc=2"),
    "watchover": (*TORCHRUN, "-m", "paceline", "watchover"),
}
GUARD = {"launch": (), "watchover": ("--end",)}
LIMIT_SECONDS = 400.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class DiagnosisRecord:
    """What a diagnosis says; nothing where there is none."""

    ran: Ran
    causes: tuple[int, ...] = ()
    site: str = ""
    page: str = ""


def marked(script: str, mark: str) -> str:
    """The line with this mark: "trainer.py:22"."""
    lines = (HERE / f"{script}.py").read_text().splitlines()
    return f"{script}.py:{next(n for n, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))}"


def started(
    script: str, where: str, launcher: str, folder: Path, hang_timeout: float, popen: Popen = subprocess.Popen
) -> DiagnosisRecord:
    """Run a script that hangs, in an empty folder. `popen` starts it."""
    for file in HERE.glob("*.py"):
        shutil.copy(file, folder)
    guard = (*GUARD[launcher], f"--hang-timeout={hang_timeout}", "--run-dir=run")
    argv = (*LAUNCHERS[launcher], *guard, f"{script}.py")
    ran = run_command(argv, folder, OFFLINE | {"FAULT": where}, limit_seconds=LIMIT_SECONDS, popen=popen)
    found = sorted(folder.glob("run/**/diagnosis-[0-9]*"))
    if not found:
        return DiagnosisRecord(ran)
    diagnosis = read_diagnosis(found[-1]).diagnosis
    return DiagnosisRecord(ran, diagnosis.causes, diagnosis.site, "\n".join(diagnosis.sentences))


def hung(script: str, where: str, launcher: str, hang_timeout: float) -> tuple[list[str], bool]:
    """A row's cells for one launcher, and whether all is right."""
    with tempfile.TemporaryDirectory() as folder:
        told = started(script, where, launcher, Path(folder), hang_timeout)
    rank, line = told.causes == (1,), told.site.startswith(f"{marked(script, f'FAULT {where}')} ")
    left = len(told.ran.processes_left)
    said = [f"NO: {told.causes}", "yes"][rank], "yes" if line else f"NO: {told.site}", str(left)
    print(f"{script} {where} {launcher}: {said} {told.ran.ended_seconds - told.ran.began_seconds:.0f} s", flush=True)
    return list(said), rank and line and not left


def ended(words: tuple[str, ...], launcher: str) -> tuple[list[str], bool]:
    """The exit code of a run that is to go well, and whether it did."""
    with tempfile.TemporaryDirectory() as folder:
        argv = (*LAUNCHERS[launcher], *(str(Path(word).resolve()) if "/" in word else word for word in words))
        ran = run_command(argv, Path(folder), OFFLINE, limit_seconds=LIMIT_SECONDS)
    print(f"{words} {launcher}: {ran.code} {ran.ended_seconds - ran.began_seconds:.0f} s", flush=True)
    if ran.code != 0 or "CAUSE" in ran.text:
        print(ran.text[-3000:], flush=True)
    return [f"{ran.code}{', ACCUSED' if 'CAUSE' in ran.text else ''}"], ran.code == 0 and "CAUSE" not in ran.text


def markdown(rows: list[list[str]]) -> str:
    """A table of which the first row is the head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


class Done:
    """What has been run: `FILE.json`, by the words of a run, its cells and whether they are right."""

    def __init__(self, out: Path | None) -> None:
        self._file = out.with_suffix(".json") if out else None
        self.runs: dict[str, tuple[list[str], bool]] = {}
        if self._file and self._file.exists():
            self.runs = json.loads(self._file.read_text())

    def once(self, run: Callable[..., tuple[list[str], bool]], *words: object) -> list[str]:
        key = " ".join(map(str, [run.__name__, *words]))
        if key not in self.runs:
            self.runs[key] = run(*words)
            if self._file:
                self._file.write_text(json.dumps(self.runs, indent=1) + "\n")
        return self.runs[key][0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", default=list(SCRIPTS), choices=SCRIPTS)
    parser.add_argument("--hang-timeout", type=float, default=8.0)
    parser.add_argument("--out", type=Path, help="FILE: FILE.json and FILE.md are written")
    options = parser.parse_args()
    done = Done(options.out)
    head = [f"{launcher}: {what}" for launcher in GUARD for what in ("rank", "line", "processes left")]
    hangs = [["framework", "rank 1 hangs in its", *head]]
    for script in options.scripts:
        for where in WHERE:
            cells = [done.once(hung, script, where, launcher, options.hang_timeout) for launcher in GUARD]
            hangs.append([SCRIPTS[script], where, *cells[0], *cells[1]])
    ends = [["what", *LAUNCHERS]]
    clean = [(f"tests/frameworks/{script}.py",) for script in options.scripts]
    own = [("-m", f"accelerate.test_utils.scripts.{name}") for name in OWN_TESTS]
    for words in [*clean, *own]:
        cells = [done.once(ended, words, launcher)[0] for launcher in LAUNCHERS]
        ends.append([words[-1].rpartition("/")[2], *cells])
    if options.out:
        options.out.with_suffix(".md").write_text(
            "# Frameworks, as they are\n\n`make soak-frameworks`; 2 ranks.\n\n"
            f"{markdown(hangs)}\nExit codes of what goes well:\n\n{markdown(ends)}"
        )
    right = [well for _, well in done.runs.values()]
    print(f"{sum(right)} of {len(right)} as they should be")
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
