"""How long from the command to the end of the first training step: `python benchmarks/startup.py`.

paceline's launcher against a bare torchrun script that does the same (MNIST CNN, 2 ranks, AdamW, batch 64 a rank, DDP).
Both write the time at which rank 0 has taken its first step; A B A B, so that a busy machine slows both.
Writes benchmarks/results/startup.json with --out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from paceline.models.cnn import CNN
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


def paceline(folder: Path) -> float:
    """Seconds until rank 0's first step, launched by paceline (strategy ddp)."""
    run_dir = folder / "run"
    began = time.time()
    subprocess.run(
        [sys.executable, "-m", "paceline", "train", "mnist-cnn", "--nproc", "2", "--strategy", "ddp", "--steps", "1",
         "--run-dir", str(run_dir)],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    records = [json.loads(line) for line in (run_dir / "events-0.jsonl").read_text().splitlines()]
    return next(record["unix_time"] for record in records if record["kind"] == "step") - began


def torchrun(folder: Path) -> float:
    """Seconds until rank 0's first step of the bare script, launched by torchrun."""
    script, mark = folder / "bare.py", folder / "mark"
    script.write_text(BARE)
    began = time.time()
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(mark)],
        check=True, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return float(mark.read_text()) - began


def help_seconds() -> float:
    """Seconds of `paceline --help`."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "paceline", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"paceline": [], "torchrun": [], "help": []}
    for _ in range(arguments.rounds):
        for name, measure in (("paceline", paceline), ("torchrun", torchrun)):
            with tempfile.TemporaryDirectory() as folder:
                times[name].append(measure(Path(folder)))
        times["help"].append(help_seconds())
    ratios = [a / b for a, b in zip(times["paceline"], times["torchrun"], strict=True)]
    rows = [
        ("paceline, command to first step, s", times["paceline"]),
        ("torchrun + bare script, the same, s", times["torchrun"]),
        ("ratio, pair by pair", ratios),
        ("paceline --help, s", times["help"]),
    ]
    for name, values in rows:
        print(
            f"{name:38} {min(values):6.2f} / {statistics.median(values):6.2f} / {max(values):6.2f}  min / median / max"
        )
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"rounds": arguments.rounds, "cores": os.cpu_count(), **times, "ratio": ratios}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
