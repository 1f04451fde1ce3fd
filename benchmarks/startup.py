"""How long from the command to the end of the first training step, and from a killed rank to the next one?

`python benchmarks/startup.py`: torchrun with a bare script as the tutorials write it, against paceline with every
worker importing torch for itself (`--preload off`) and with workers forked from one process that has (`auto`). MNIST
CNN, AdamW, batch 64 a rank, each with its own data parallelism: DDP, and paceline's default. A B C, B C A, ..., so that
a busy machine slows all. The clock stops when rank 0 has taken its first step. For a restart a rank is killed with
SIGKILL in the middle of a run, and the clock stops at the first step of the next generation; torchrun would begin at
step 0 again, so it takes no part.

--quick is one round, to see whether it works; --out writes the result there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from race.figures import lower_quartile, machine
from race.quiet import wait_until_idle

LIMIT_SECONDS = 600.0
STEPS_BEFORE_KILL = 20  # a snapshot is kept every 10
Seconds = dict[str, list[float]]

BARE = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from paceline.tasks.mnist import CNN
from paceline.tasks.mnist import dataset

dist.init_process_group("gloo")
data, test = dataset("train"), dataset("test")  # both, as a real script has both
model = DistributedDataParallel(CNN())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
for images, labels in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(str(time.time()))
    break
dist.destroy_process_group()
"""


def command(nproc: int, preload: str, run_dir: Path, *flags: str) -> list[str]:
    """A training under paceline's own launcher."""
    train = [sys.executable, "-m", "paceline", "train", "mnist-cnn", "--device", "cpu"]
    return [*train, "--nproc", str(nproc), "--preload", preload, "--run-dir", str(run_dir), *flags]


def records(run_dir: Path) -> list[dict[str, Any]]:
    """What rank 0 has written down so far."""
    path = run_dir / "events-0.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def paceline(nproc: int, preload: str, folder: Path) -> float:
    """Seconds until rank 0's first step, launched by paceline."""
    began = time.time()
    argv = command(nproc, preload, folder / "run", "--steps", "1")
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_SECONDS)
    return next(record["unix_time"] for record in records(folder / "run") if record["kind"] == "step") - began


def torchrun(nproc: int, folder: Path) -> float:
    """Seconds until rank 0's first step of the bare script, launched by torchrun."""
    script, mark = folder / "bare.py", folder / "mark"
    script.write_text(BARE)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    began = time.time()
    subprocess.run(
        [*argv, str(script), str(mark)],
        check=True, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    return float(mark.read_text()) - began


def restart(nproc: int, preload: str, folder: Path) -> float:
    """Seconds from the death of the last rank to rank 0's first step in the next generation."""
    run_dir = folder / "run"
    argv = command(nproc, preload, run_dir, "--steps", "100000", "--max-restarts", "1")
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(lambda: _steps(run_dir, generation=0) >= STEPS_BEFORE_KILL, process)
        last = (run_dir / f"events-{nproc - 1}.jsonl").read_text().splitlines()
        pid = next(record["pid"] for record in map(json.loads, last[:2]) if record["kind"] == "started")
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        _wait(lambda: _steps(run_dir, generation=1) > 0, process)
        return next(record["unix_time"] for record in _of(run_dir, 1) if record["kind"] == "step") - killed
    finally:
        process.terminate()
        time.sleep(0.5)  # closer together they are one request
        process.terminate()
        process.wait(LIMIT_SECONDS)


def _of(run_dir: Path, generation: int) -> list[dict[str, Any]]:
    found, current = [], -1
    for record in records(run_dir):
        current = record["generation"] if record["kind"] == "started" else current
        found += [record] if current == generation else []
    return found


def _steps(run_dir: Path, generation: int) -> int:
    return sum(record["kind"] == "step" for record in _of(run_dir, generation))


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run that was to be killed ended early, or stood still: {process.returncode}")
        time.sleep(0.05)


def help_seconds(folder: Path) -> float:
    """Seconds of `paceline --help`."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "paceline", "--help"], check=True, stdout=subprocess.DEVNULL, cwd=folder)
    return time.perf_counter() - began


def measures(ranks: list[int]) -> dict[str, Callable[[Path], float]]:
    """What is measured, by name, in the order of one round."""
    found: dict[str, Callable[[Path], float]] = {}
    for n in ranks:
        found[f"{n} ranks: torchrun"] = partial(torchrun, n)
        found[f"{n} ranks: preload off"] = partial(paceline, n, "off")
        found[f"{n} ranks: preload auto"] = partial(paceline, n, "auto")
    for n in ranks:
        found[f"{n} ranks: restart, preload off"] = partial(restart, n, "off")
        found[f"{n} ranks: restart, preload auto"] = partial(restart, n, "auto")
    return {**found, "paceline --help": help_seconds}


def ratios(seconds: Seconds) -> Seconds:
    """Pair by pair: against torchrun, and of a restart with against without."""
    found: Seconds = {}
    for name, values in seconds.items():
        base = name.partition(":")[0] + ": torchrun"
        if name.endswith("restart, preload auto"):
            base = name.replace("auto", "off")
        if base in seconds and base != name and not name.endswith("restart, preload off"):
            found[f"{name} / {base.partition(': ')[2]}"] = [a / b for a, b in zip(values, seconds[base], strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--patience", type=float, default=30.0, help="seconds to wait for a quiet machine before a run")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rounds, patience = (1, 0.0) if arguments.quick else (arguments.rounds, arguments.patience)
    chosen = measures(arguments.ranks)
    names, seconds = [*chosen], {name: [] for name in chosen}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            wait_until_idle(patience)
            with tempfile.TemporaryDirectory() as folder:
                seconds[name].append(chosen[name](Path(folder)))
        if arguments.out:  # after each round: the rest may be cut off
            write(arguments.out, number + 1, seconds, f"{arguments.ranks[0]} ranks: preload auto / torchrun")
    compared = ratios(seconds)
    for title, values in [*((f"{name}, s", values) for name, values in seconds.items()), *compared.items()]:
        quartile = lower_quartile([-value for value in values])  # the upper one: less is better here
        said = "" if quartile is None else f", upper quartile {-quartile:.2f}"
        print(f"{title:44} {min(values):6.2f} / {median(values):6.2f} / {max(values):6.2f}  min / median / max{said}")


def write(out: Path, rounds: int, seconds: Seconds, first: str) -> None:
    """All that was measured; "ratio" is that of `first`."""
    compared = ratios(seconds)
    result = {"machine": machine(), "rounds": rounds, "seconds": seconds, "ratios": compared}
    out.write_text(json.dumps({**result, "ratio": compared[first]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
