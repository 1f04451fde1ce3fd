"""What does the hang guard cost? `python benchmarks/guard.py`.

The same training with the guard and without it (`--hang-timeout off`), in turn, A B B A A B ..., so that a busy machine
slows both; a run counts by the median of its steps after the first ones, the guard by the ratios pair by pair. The
noise of two such runs is larger than what is looked for, so the parts are measured, too, each by itself in a loop:

    share = what one step does of each part (phases entered, collectives written down, ...) x its cost / a step's time

With --out the result is written there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch.distributed as dist
from torch import nn

from paceline import Task
from paceline.protocol.evidence import Phase
from paceline.protocol.status_page import StatusPage, make_status_page
from paceline.rank.guard import HangGuard
from paceline.tasks.mnist import cross_entropy, dataset

WARM_UP_STEPS = 20
MODELS = {"mnist-cnn": "mnist-cnn", "mlp": f"{Path(__file__).resolve()}:mlp"}
LIMIT_SECONDS = 600


def mlp() -> Task:
    """784 -> 512 -> 512 -> 10: a step of few milliseconds, in which every microsecond shows."""

    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )

    return Task(make_model, dataset, cross_entropy)


def step_seconds(model: str, steps: int, hang_timeout: str) -> float:
    """The median step of a run on two processes."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        subprocess.run(
            [sys.executable, "-m", "paceline", "train", MODELS[model], "--nproc", "2", "--batch-size", "64",
             "--steps", str(steps), "--hang-timeout", hang_timeout, "--run-dir", str(run_dir)],
            check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_SECONDS,
        )  # fmt: skip
        records = [json.loads(line) for line in (run_dir / "events-0.jsonl").read_text().splitlines()]
    return median([r["seconds"] for r in records if r["kind"] == "step"][min(WARM_UP_STEPS, steps // 2) :])


def each(call: Callable[[], object], count: int = 5000) -> float:
    """Seconds of one call: the best of five loops, for others' work only adds to it."""
    found: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - began) / count)
    return min(found)


def parts() -> dict[str, float]:
    """Seconds that each part takes once. The collective's is the difference that the wrapper makes."""
    import torch

    page = StatusPage(make_status_page(0))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.ones(1)
        plain = each(lambda: dist.all_reduce(tensor), 2000)
        guard = HangGuard.of_process().watch_torch()
        wrapped = each(lambda: dist.all_reduce(tensor), 2000)
        return {
            "a phase entered": each(lambda: page.enter(Phase.FORWARD)),
            "a collective written down": wrapped - plain,
            "the order taken": each(guard.ledger.take_order),
        }
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, nargs=2, default=(150, 600), metavar=("CNN", "MLP"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, object] = {"cores": os.cpu_count(), "pairs": arguments.pairs}
    for model, steps in zip(MODELS, arguments.steps, strict=True):
        runs: dict[str, list[float]] = {"auto": [], "off": []}
        for pair in range(arguments.pairs):
            for hang_timeout in ("auto", "off") if pair % 2 == 0 else ("off", "auto"):
                runs[hang_timeout].append(step_seconds(model, steps, hang_timeout))
        ratios = [on / off for on, off in zip(runs["auto"], runs["off"], strict=True)]
        result[model] = {"ms a step": {name: [1e3 * s for s in found] for name, found in runs.items()}, "ratio": ratios}
        print(
            f"{model:10} with / without the guard: {min(ratios):.3f} / {median(ratios):.3f} / {max(ratios):.3f}  "
            f"min / median / max of {len(ratios)} pairs; {1e3 * median(runs['off']):.2f} ms a step"
        )
    costs = {name: 1e6 * seconds for name, seconds in parts().items()}
    result["us"] = costs
    print("; ".join(f"{name} {cost:.1f} us" for name, cost in costs.items()))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
