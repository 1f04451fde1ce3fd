"""How long from the command to the accuracy after an epoch of MNIST? `python benchmarks/epoch.py`.

`paceline train mnist-cnn` against the tutorial's script (benchmarks/race/loops/tutorial.py) under torchrun, 2 ranks,
batch 128 each, in turn, A B B A ..., so that a busy machine slows both. The clock stops at the first line of output
that speaks of accuracy. --quick trains for 3 steps, to see whether it works; --out writes the result there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from race.contenders import PACELINE, TORCHRUN
from race.figures import lower_quartile, machine
from race.quiet import wait_until_idle
from race.starter import HERE
from race.works import WORKS

LIMIT_SECONDS = 1800
QUICK_STEPS = 3


def seconds_to_accuracy(argv: Sequence[str]) -> tuple[float, float]:
    """Seconds from the start of a command to its line with the accuracy, and that number."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), "GLOO_SOCKET_IFNAME": "lo"}
    began = time.monotonic()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        found: tuple[float, float] | None = None
        for line in process.stdout:  # to its end: whoever stops reading would break the other's pipe
            match = re.search(r"accuracy\D*([0-9.]+)( ?%)?", line)
            if match and found is None:
                found = time.monotonic() - began, float(match[1]) / (100 if match[2] else 1)
        code = process.wait(LIMIT_SECONDS)
    if code or found is None:
        raise SystemExit(f"{argv} ended with {code}, accuracy said: {found is not None}")
    return found


def commands(nproc: int, steps: int, data_dir: Path | None, run_dir: Path) -> dict[str, list[str]]:
    """The same training in both ways."""
    data = ["--data-dir", str(data_dir)] if data_dir else []
    length = ["--steps", str(steps)] if steps else ["--epochs", "1"]
    ours = [*PACELINE, "mnist-cnn", "--nproc", str(nproc), *WORKS["W1"].train_flags, "--run-dir", str(run_dir)]
    script = [*TORCHRUN, f"--nproc-per-node={nproc}", str(HERE / "loops" / "tutorial.py")]
    return {"paceline": [*ours, *length, *data], "tutorial": [*script, *length, *data]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--data-dir", type=Path, help="other IDX files than the packaged MNIST")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds to wait for a quiet machine before a run")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pairs, steps, patience = (1, QUICK_STEPS, 0.0) if arguments.quick else (arguments.pairs, 0, arguments.patience)
    found: dict[str, list[tuple[float, float]]] = {"paceline": [], "tutorial": []}
    for pair in range(pairs):
        for name in list(found) if pair % 2 == 0 else list(found)[::-1]:
            wait_until_idle(patience)
            with tempfile.TemporaryDirectory() as folder:
                argv = commands(arguments.nproc, steps, arguments.data_dir, Path(folder) / "run")[name]
                found[name].append(seconds_to_accuracy(argv))
    seconds = {name: [one for one, _ in runs] for name, runs in found.items()}
    ratios = [theirs / own for own, theirs in zip(seconds["paceline"], seconds["tutorial"], strict=True)]
    for name, runs in found.items():
        print(
            f"{name:10} {min(seconds[name]):6.1f} / {median(seconds[name]):6.1f} / {max(seconds[name]):6.1f} s "
            f"min / median / max; accuracy {median(score for _, score in runs):.4f}"
        )
    quartile = lower_quartile(ratios)
    said = "not measured (fewer than 5 pairs)" if quartile is None else f"{quartile:.2f}"
    print(f"tutorial / paceline: lower quartile {said}, median {median(ratios):.2f}")
    if arguments.out:
        accuracies = {name: [score for _, score in runs] for name, runs in found.items()}
        about = {"machine": machine(), "nproc": arguments.nproc, "pairs": pairs, "steps": steps or "an epoch"}
        result = {**about, "seconds": seconds, "accuracy": accuracies, "ratio": ratios}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
