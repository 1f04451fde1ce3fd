"""Are flipped bits found by audits, on the right rank, and are healthy ranks never named? What do audits cost?

    PYTHONPATH=. python tests/soak_audit.py --part once --out benchmarks/results/audit.json

once     one bit flips in an audited micro-batch: found in that step. Flips without an effect do not count
always   a bit flips in each micro-batch of one rank: found within a turn, which is V x N steps
healthy  trainings without a fault: no alarm
cost     the processor time of steps with audits, against steps without

Each part continues where it was interrupted: the record has all chunks. tests/train/test_audit.py is a small sample.
The exit code is 1 if a part has failed.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from tests import warm
from tests.run_ranks import run_ranks
from tests.run_script import run_script
from tests.small_mnist import write_mnist
from tests.train import audited

from paceline.errors import ExitCode

CHUNK = 50  # flips on the ranks of one start
WORLDS = [(3, "exact", 5, 2), (2, "zero", 4, 1), (4, "exact", 4, 1), (3, "zero", 6, 1), (2, "exact", 3, 2)]
"""processes, strategy, virtual ranks, micro-batches"""
EVERY = 2  # steps, of the part `always`
STOPS = 900.0  # seconds for the ranks of one start


def judged(results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What became of flips: the numbers by kind, and each that was not found or whose rank was named wrongly."""
    counts, wrong = Counter[str](), list[dict[str, Any]]()
    for result in results:
        named, faulty = result.get("ranks"), result["faulty"]
        if named is None:  # a number that was not finite ends the run before an audit
            fate = result["code"] if "code" in result else "no effect" if result["same"] else "missed"
        elif result["code"] == "audit-undecided":
            fate = "undecided" if faulty in named else "wrong rank"
        else:
            fate = "found" if named == [faulty] else "wrong rank"
        counts[f"{result['kind']}: {fate}"] += 1
        if fate in ("missed", "wrong rank"):
            wrong.append(result)
    return {"counts": dict(counts), "wrong": wrong, "turns": [r["steps"] / r.get("turn", 1) for r in results]}


def once(folder: Path, seed: int, number: int) -> dict[str, Any]:
    size, *options = WORLDS[number % len(WORLDS)]
    return judged(run_ranks(audited.flip_once, size, folder, seed + number, CHUNK, *options, timeout=STOPS)[0])


def always(folder: Path, seed: int, number: int) -> dict[str, Any]:
    size, strategy, virtual_ranks, _ = WORLDS[number % len(WORLDS)]
    options = seed + number, CHUNK // 5, strategy, virtual_ranks, EVERY
    return judged(run_ranks(audited.flip_always, size, folder, *options, timeout=STOPS)[0])


def healthy(folder: Path, seed: int, number: int) -> dict[str, Any]:
    """One random training with an audit in each step."""
    dice, began = random.Random(f"{seed} {number}"), time.monotonic()
    virtual_ranks, task = dice.randint(2, 6), dice.choice(["mnist-cnn", "mnist-cnn", "mnist-resnet18"])
    steps, small = (60, []) if task == "mnist-cnn" else (5, ["--stem", "small"])
    size, data = dice.randint(2, min(4, virtual_ranks)), write_mnist(folder / f"mnist-{number}", train=101)
    words = [
        task, *small, "--data-dir", data, "--run-dir", folder / f"run-{number}", "--strategy",
        dice.choice(["exact", "zero"]), "--virtual-ranks", virtual_ranks, "--steps", steps, "--global-batch", 32,
        "--accumulation", dice.choice([1, 2]), "--device", "cpu", "--audit-every", 1,
        *(["--clip-norm", 1] if dice.random() < 0.5 else []), *(["--precision", "bf16"] if dice.random() < 0.2 else []),
    ]  # fmt: skip
    done = run_script(size, "-m", "paceline", "train", *words, cwd=folder, timeout=STOPS)
    failure = f"{' '.join(map(str, words))}: {done.stderr[-2000:]}" if done.returncode else ""
    return {"task": task, "audits": steps, "seconds": time.monotonic() - began, "failure": failure}


def cost(folder: Path, seed: int, number: int) -> dict[str, Any]:
    rounds, said = run_ranks(audited.timed, 2, folder, timeout=STOPS)[0]
    computation, time_percent = map(float, re.findall(r"([\d.]+) %", said))
    return {
        "virtual_ranks": audited.COST_RANKS, "every": audited.COST_EVERY, "ranks": 2,
        "stated_percent_of_computation": computation,
        "measured_percent_of_processor_time": 100 * (median(a / b for a, _, b, _ in rounds) - 1),
        "stated_percent_of_time": time_percent,
        "measured_percent_of_time": 100 * (median(a / b for _, a, _, b in rounds) - 1),
    }  # fmt: skip


def effective(chunks: Iterable[dict[str, Any]]) -> int:
    counts = sum((Counter(chunk["counts"]) for chunk in chunks), Counter[str]())
    return sum(count for kind, count in counts.items() if not kind.endswith("no effect"))


PARTS = {"once": once, "always": always, "healthy": healthy, "cost": cost}
GOALS = {"once": 1000, "always": 100, "healthy": 3600, "cost": 3}


def progress(part: str, chunks: list[dict[str, Any]]) -> float:
    if part == "cost":
        return len(chunks)
    return effective(chunks) if part in ("once", "always") else sum(chunk["seconds"] for chunk in chunks)


def summary(record: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part, chunks in record["chunks"].items():
        if part == "cost":
            found[part] = {name: median(chunk[name] for chunk in chunks) for name in chunks[0]}
        elif part == "healthy":
            failures = [chunk["failure"] for chunk in chunks if chunk["failure"]]
            found[part] = {
                "runs": len(chunks), "audits": sum(chunk["audits"] for chunk in chunks),
                "seconds": round(progress(part, chunks)), "failures": failures,
            }  # fmt: skip
        else:
            counts = sum((Counter(chunk["counts"]) for chunk in chunks), Counter[str]())
            by_fate = Counter[str]()
            for kind, count in counts.items():
                by_fate[kind.partition(": ")[2]] += count
            turns = [turn for chunk in chunks for turn in chunk["turns"]]
            found[part] = {
                "flips": effective(chunks), "fates": dict(by_fate), "kinds": dict(sorted(counts.items())),
                "wrong": [result for chunk in chunks for result in chunk["wrong"]],
                "found_within_a_turn": sum(turn <= 1 for turn in turns), "of": len(turns),
            }  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the record: JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--goal", type=float, help="flips, or seconds of healthy runs (default: 1,000, 100, 3,600)")
    chosen = parser.parse_args()
    goal = chosen.goal or GOALS[chosen.part]
    record = json.loads(chosen.out.read_bytes()) if chosen.out.exists() else {"seed": chosen.seed, "chunks": {}}
    chunks: list[dict[str, Any]] = record["chunks"].setdefault(chosen.part, [])
    with tempfile.TemporaryDirectory(prefix="soak-audit-") as name:
        while progress(chosen.part, chunks) < goal:
            chunks.append(PARTS[chosen.part](Path(name).resolve(), record["seed"], len(chunks)))
            commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
            record |= {"commit": commit, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "summary": summary(record)}
            chosen.out.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{chosen.part}: {progress(chosen.part, chunks):,.0f} of {goal:,.0f}", flush=True)
    found = summary(record)[chosen.part]
    print(json.dumps(found, indent=1))
    return int(bool(found.get("wrong") or found.get("failures"))) and int(ExitCode.FAILED)


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        warm.close()
