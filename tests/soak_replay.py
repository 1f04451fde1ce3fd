"""Does `paceline replay` reproduce every bit? Random steps of random runs, as tasks and as sessions.

    PYTHONPATH=. python tests/soak_replay.py --out replay.json

Each run has 2 to 8 virtual ranks, `exact` or `zero`, and 1 to 4 processes. A random step is repeated on one process,
then the steps up to the next checkpoint. The logged loss and the digest of the checkpoint must be reproduced, and no
file of the run may change. The exit code is 1 if a case failed. tests/lab/test_replay.py is a small sample of this.
"""

import argparse
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import warm
from tests.run_script import run_script
from tests.small_mnist import write_mnist

from paceline.checkpoint.manager import Checkpoints
from paceline.checkpoint.shards import ShardFileSource, hash_tensors
from paceline.runs.events import Step, read_events

TASKS = Path(__file__).parent / "lab" / "tasks_to_replay.py"
LOOP = Path(__file__).parent / "lab" / "loop_to_replay.py"
STEPS = 14
REPEATED = 5  # steps of each run


def hashes(run_dir: Path) -> dict[str, str]:
    files = [path for path in sorted(run_dir.rglob("*")) if path.is_file()]
    return {f"{path} {path.stat().st_mtime_ns}": hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def logged_loss(run_dir: Path, step: int) -> float:
    found = [e for e in read_events(run_dir / "events-0.jsonl") if isinstance(e, Step) and e.step == step]
    return found[-1].loss


def digest_of(run_dir: Path, step: int) -> str:
    checkpoints = Checkpoints(run_dir / "checkpoints")
    (path,) = (entry.path for entry in checkpoints.entries() if entry.step == step)
    source = ShardFileSource.from_checkpoint(path, checkpoints.check(path))
    return hash_tensors({name: tensor for name in source.names("") if (tensor := source.tensor(name)) is not None})


def replayed(run_dir: Path, step: int, *more: object) -> tuple[int, str, dict[str, Any]]:
    """`paceline replay RUN --step STEP`: its exit code, its output and its result."""
    out = run_dir.with_suffix(".json")
    out.unlink(missing_ok=True)
    command = ["-m", "paceline", "replay", run_dir, "--step", step, "--json", out, *more]
    done = warm.run(command, cwd=run_dir.parent)
    return done.returncode, done.stdout + done.stderr, json.loads(out.read_bytes()) if out.is_file() else {}


def train(run_dir: Path, data: Path, dice: random.Random) -> list[object]:
    """A random run. Returns the arguments that its replay needs."""
    virtual_ranks, strategy = dice.randint(2, 8), dice.choice(["exact", "zero"])
    nproc, every = dice.randint(1, min(4, virtual_ranks)), dice.choice([2, 3, 5])
    kind = dice.choice(["mnist-cnn", "mnist-resnet18", "task", "session", "session"])
    if kind == "session":
        arguments = ["--run", run_dir, "--strategy", strategy, "--ranks", virtual_ranks, "--every", every, "--keep", 99]
        done = run_script(nproc, LOOP, *arguments, cwd=run_dir.parent)
        more: list[object] = [LOOP, "--", *arguments]
    else:
        task = [f"{TASKS}:planted"] if kind == "task" else [kind, "--data-dir", data]
        settings = [
            *task, "--run-dir", run_dir, "--strategy", strategy, "--virtual-ranks", virtual_ranks, "--steps", STEPS,
            "--global-batch", 32, "--accumulation", dice.choice([1, 2]), "--checkpoint-every", every,
            "--keep-checkpoints", 99, *(["--clip-norm", 1] if dice.random() < 0.5 else []),
            *(["--stem", "small"] if kind == "mnist-resnet18" else []),
            *(["--ema", 0.9] if dice.random() < 0.3 else []), *(["--last-batch", "drop"] if kind == "task" else []),
        ]  # fmt: skip
        done = run_script(nproc, "-m", "paceline", "train", *settings, "--device", "cpu", cwd=run_dir.parent)
        more = []
    if done.returncode:
        raise SystemExit(f"{run_dir}: {done.stdout}{done.stderr}")
    print(f"{run_dir.name}: {kind}, {strategy}, {nproc} processes, {virtual_ranks} virtual ranks", flush=True)
    return more


def faults(run_dir: Path, step: int, more: list[object]) -> Iterator[str]:
    before = hashes(run_dir)
    code, output, result = replayed(run_dir, step, "--check", *more)
    if code or not result:
        yield f"exit code {code}: {output[-2000:]}"
        return
    if result["loss"].hex() != logged_loss(run_dir, step).hex():
        yield f"loss {result['loss']!r}, logged {logged_loss(run_dir, step)!r}"
    if result["digest"] != digest_of(run_dir, result["checkpoint"]):
        yield f"digest {result['digest']!r} of checkpoint {result['checkpoint']}"
    if result["reasons"]:
        yield f"reasons {result['reasons']}"
    if hashes(run_dir) != before:
        yield "the run folder has changed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the results go: JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50, help="steps to repeat (default: 50)")
    chosen = parser.parse_args()
    dice, results = random.Random(chosen.seed), dict[str, list[str]]()
    with tempfile.TemporaryDirectory(prefix="soak-replay-") as name:
        folder = Path(name).resolve()
        data = write_mnist(folder / "mnist", train=101)
        for number in range(-(-chosen.count // REPEATED)):
            run_dir = folder / f"run-{number}"
            more = train(run_dir, data, dice)
            last = max(entry.step for entry in Checkpoints(run_dir / "checkpoints").entries())
            for step in dice.sample(range(1, last + 1), min(REPEATED, chosen.count - len(results))):
                found = results[f"{run_dir.name} step {step}"] = [*faults(run_dir, step, more)]
                print(f"  step {step}: {'; '.join(found) or 'the same bits'}", flush=True)
                chosen.out.write_text(json.dumps({"seed": chosen.seed, "cases": results}, indent=2) + "\n")
    failed = sum(map(bool, results.values()))
    print(f"{len(results)} steps, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        warm.close()
