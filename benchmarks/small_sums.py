"""How long do ranks on two hosts take to add up a few numbers? paceline's way, and torch's all-reduce beside it.

    python benchmarks/small_sums.py --out benchmarks/results/small-sums.json

2, 4 and 8 ranks, on a cable of 20 ms there and back and on one without delay; the two ways in turn, A B A B. In a step
the ranks' words (losses, weights, votes) are such a sum. Root only, and the programs of tests/cluster (.ci/install).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from race.starter import HERE
from race.wire import Wire
from two_hosts import hindrance

sys.path.insert(0, str(HERE.parents[1]))  # the hosts are those of the tests
from tests.cluster.lab import Lab

from paceline.collectives.torch_collectives import start_all_reduce

HOSTS, PORT, NUMBERS, ROUNDS = ("n1", "n2"), 29500, 40, 15
CABLES = {"20 ms, 100 Mbit/s": (100e6, 0.01), "no delay, 10 Gbit/s": (10e9, 0.0)}  # bits a second, seconds one way


def rank() -> None:
    """One of the ranks: the milliseconds of each sum, on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    numbers = torch.ones(NUMBERS, dtype=torch.float64)
    ways = {
        "all_reduce": lambda: dist.all_reduce(numbers.clone()),
        "paceline": lambda: start_all_reduce(numbers, "benchmark")(),
    }
    ms: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, add_up in ways.items():
            dist.barrier()
            began = time.monotonic()
            add_up()
            ms[name].append(round(1000 * (time.monotonic() - began), 2))
    if dist.get_rank() == 0:
        print(json.dumps({name: own[1:] for name, own in ms.items()}), flush=True)
    dist.barrier()
    os._exit(0)  # torch may abort in its destructors


def measured(lab: Lab, wire: Wire, each: int) -> dict[str, list[float]]:
    """The milliseconds of both ways, with so many ranks on each host."""
    ranks: list[subprocess.Popen[Any]] = []
    for number in range(each * len(HOSTS)):
        env = {
            "RANK": str(number), "WORLD_SIZE": str(each * len(HOSTS)), "MASTER_ADDR": wire.address(HOSTS[0]),
            "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": wire.NIC, "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{HERE.parent}:{HERE.parents[1]}",
        }  # fmt: skip
        argv = [sys.executable, str(Path(__file__).resolve()), "--rank"]
        output = subprocess.PIPE if number == 0 else None
        ranks.append(lab.popen(HOSTS[number // each], *argv, env=env, stdout=output))
    told = ranks[0].communicate(timeout=120)[0]
    if any(one.wait(timeout=30) for one in ranks):
        raise SystemExit("a rank has failed")
    return json.loads(told.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank()
    if why := hindrance():
        print(f"skipped: {why}")
        return 0
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="sums-") as folder, ExitStack() as stack:
        lab = Lab(Path(folder), len(HOSTS))
        stack.callback(lab.close)
        for cable, (rate, delay) in CABLES.items():
            with Wire(lab, HOSTS, rate=rate, delay=delay) as wire:
                for each in (1, 2, 4):
                    found[f"{each * len(HOSTS)} ranks, {cable}"] = ms = measured(lab, wire, each)
                    told = "  ".join(
                        f"{name} {median(own):.1f} ({min(own):.1f} to {max(own):.1f})" for name, own in ms.items()
                    )
                    print(f"{each * len(HOSTS)} ranks, {cable}, ms: {told}")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
