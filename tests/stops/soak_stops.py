"""Stop requests at random moments of scripts and sessions: is the work saved, the result equal?

    PYTHONPATH=. python tests/stops/soak_stops.py --count 100 --out benchmarks/results/stops.json

Each repeat starts a script of this folder (Trainer, Lightning, Accelerate, a session) on 2 ranks under `paceline
launch`, and waits until rank 0 reaches a moment (import, first step, accumulation, step, evaluation, saving). The
number of the repeat determines the script and the kind of moment, in turn. The seed and the number determine how often
the moment is reached before, and who gets which signal how much later. The same command then runs to its end. A repeat
is right if the run has saved (exit code 75), has finished, or had taken no step since its start, if no step is lost or
repeated after a stop that has saved, and if the final weights have the same bits as those of an uninterrupted run.

Repeats that are in the file already are left out. The exit code is 1 if a repeat is not right.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
SCRIPTS = ("trainer", "lit", "accelerated", "own_loop")
MOMENTS = ("import", "first step", "accumulate", "step", "evaluate", "save")
WHO = ("launcher, SIGTERM", "launcher, SIGINT", "rank 0, SIGTERM", "rank 1, SIGTERM")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
LIMIT_SECONDS = 180.0
WORKED = {"step", "accumulate", "evaluate"}
BATCHES = {  # the moments of which each step, or each batch, has one
    "trainer": {"step", "evaluate", "save"},
    "lit": {"step", "accumulate"},
    "accelerated": {"step", "accumulate"},
    "own_loop": {"accumulate"},
}
SAVED = 75
Popen = Callable[..., Any]


class Stop(NamedTuple):
    """When a run is stopped, and who gets the signal."""

    moment: str
    number: int = 1  # of the times that the moment is reached
    after_seconds: float = 0.0
    who: str = WHO[0]


def start(script: str, folder: Path, popen: Popen = subprocess.Popen) -> tuple[Any, Path]:
    """Start a script, with arguments after a space, in its folder; return the launcher and the file with its output."""
    for file in HERE.glob("*.py"):
        shutil.copy(file, folder)
    output = folder / f"output-{len([*folder.glob('output-*')])}.txt"
    name, *words = script.split()
    argv = [sys.executable, "-m", "paceline", "launch", "--nproc=2", f"{name}.py", *words]
    with output.open("w") as file:
        process = popen(argv, cwd=folder, env={**os.environ, **ENVIRONMENT}, stdout=file, stderr=file)
    return process, output


def moments(output: Path) -> list[str]:
    """The moments that rank 0 has reached."""
    lines = (line.partition("REACHED ")[2] for line in output.read_text(errors="replace").splitlines())
    return [line for line in lines if line]


def batches(script: str, folder: Path) -> int:
    """The steps or batches of all starts in this folder."""
    return sum(moment in BATCHES[script.split()[0]] for output in folder.glob("output-*") for moment in moments(output))


def wait_for(stop: Stop, process: Any, output: Path) -> None:
    """Return when rank 0 has reached the moment, or the run has ended."""
    wanted, number = ("step", 1) if stop.moment == "first step" else (stop.moment, stop.number)
    deadline = time.monotonic() + LIMIT_SECONDS
    while moments(output).count(wanted) < number and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(stop.after_seconds)


def rank_pid(folder: Path, rank: int) -> int:
    """The process of a rank, from the record that the agent keeps of its workers."""
    roster = next(folder.glob("runs/*/attempt-*/agent-0.json"))
    return next(worker["pid"] for worker in json.loads(roster.read_text())["workers"] if worker["rank"] == rank)


def stopped(script: str, stop: Stop, folder: Path, popen: Popen = subprocess.Popen) -> tuple[int, Sequence[str]]:
    """Start the script and stop it; return its exit code and the moments that it has reached."""
    process, output = start(script, folder, popen)
    wait_for(stop, process, output)
    who, _, name = stop.who.partition(", ")
    pid = process.pid if who == "launcher" else rank_pid(folder, int(who.split()[1]))
    if process.poll() is None:
        with suppress(ProcessLookupError):  # the rank has ended
            os.kill(pid, signal.Signals[name])
    code = process.wait(LIMIT_SECONDS)
    return code, moments(output)


def finished(script: str, folder: Path, popen: Popen = subprocess.Popen) -> tuple[int, str]:
    """Run the script to its end; return its exit code and the digest of the final weights."""
    process, output = start(script, folder, popen)
    code = process.wait(LIMIT_SECONDS)
    digests = [moment.split()[1] for moment in moments(output) if moment.startswith("digest")]
    return code, digests[0] if digests else ""


def repeat(script: str, stop: Stop, expected: str, expected_batches: int) -> dict[str, Any]:
    """Stop a run, and let the same command finish."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, reached = stopped(script, stop, folder)
        again, digest = (0, expected) if code == 0 else finished(script, folder)
        lost = code not in (0, SAVED) and bool(WORKED & {*reached})
        extra = batches(script, folder) - expected_batches if code in (0, SAVED) else 0
        right = again == 0 and digest == expected and not lost and not extra
        if not right:
            print(*((file.read_text()[-3000:]) for file in sorted(folder.glob("output-*"))), sep="\n----\n", flush=True)
    how = {0: "finished", SAVED: "saved"}.get(code, "lost" if lost else "restarted before the first step")
    found = {"code": code, "how": how, "same_bits": digest == expected, "extra_batches": extra, "right": right}
    return {"script": script, **stop._asdict(), **found}


def drawn(seed: int, number: int) -> tuple[str, Stop]:
    """The script and the stop of a repeat."""
    draw = random.Random(f"{seed}-{number}")
    turn, script = divmod(number, len(SCRIPTS))
    moment, times = MOMENTS[turn % len(MOMENTS)], draw.randint(1, 3)
    stop = Stop(moment, 1 if moment == "import" else times, round(draw.uniform(0.0, 0.3), 3), draw.choice(WHO))
    return SCRIPTS[script], stop


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every N-th repeat")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no repeat after this time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {"seed": options.seed, "whole": {}, "repeats": {}}
    if options.out and options.out.exists():
        record = json.loads(options.out.read_text())
    began = time.monotonic()
    part, parts = options.part
    for number in range(part, options.count, parts):
        script, stop = drawn(options.seed, number)
        is_late = time.monotonic() > began + 60 * options.minutes
        if script not in options.scripts or str(number) in record["repeats"] or is_late:
            continue
        if script not in record["whole"]:
            with tempfile.TemporaryDirectory() as folder:
                code, digest = finished(script, Path(folder))
                assert code == 0, f"{script} fails without a stop"
                record["whole"][script] = digest, batches(script, Path(folder))
        record["repeats"][str(number)] = found = repeat(script, stop, *record["whole"][script])
        print(number, found, flush=True)
        repeats = record["repeats"].values()
        counts = {name: Counter(one["how"] for one in repeats if one["script"] == name) for name in SCRIPTS}
        record["summary"] = {"count": len(repeats), "right": sum(one["right"] for one in repeats), **counts}
        if options.out:
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(one["right"] for one in record["repeats"].values()))


if __name__ == "__main__":
    sys.exit(main())
