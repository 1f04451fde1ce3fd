"""What helps on a slow network? Two hosts joined by a cable of a stated rate and delay; DDP and its hooks beside.

    python benchmarks/slow_network.py --work W3g --rate 100mbit --delay 20 --out benchmarks/results/slow-network.json
    python benchmarks/slow_network.py --work W3g --losses 192 --out benchmarks/results/slow-network.json

All ways train in the same two processes, one on each host, on the very same batches, lap by lap: A B C A B C. The first
command measures the time of a step, the second the loss on samples that nobody trains on, by steps (on a fast cable: it
is the same on a slow one). Of both, --table makes loss against wall time; "+" is the end of a curve. What was measured
before stays in the record, and is written over by its name. `delay` is what ping would say, in milliseconds. Root
only, and the programs of tests/cluster (.ci/install).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from race.contenders import BASE
from race.loops.slow import PACELINE, TORCH
from race.starter import HERE
from race.wire import Wire
from race.works import WORKS
from two_hosts import BITS, hindrance

sys.path.insert(0, str(HERE.parents[1]))  # the hosts are those of the tests
from tests.cluster.lab import Lab

HOSTS, PORT = ("n1", "n2"), 29500  # the hosts are ours alone


def trained(work: str, words: list[str], rate: float | None, delay_ms: float) -> Iterator[dict[str, Any]]:
    """What rank 0 of `race.loops.slow` says between two fresh hosts, as it comes; `rate` None: as fast as can be."""
    with tempfile.TemporaryDirectory(prefix="slow-") as folder, ExitStack() as stack:
        lab = Lab(Path(folder), len(HOSTS))
        stack.callback(lab.close)
        address, nic = lab.address(HOSTS[0]), "eth0"
        if rate is not None:
            wire = stack.enter_context(Wire(lab, HOSTS, rate=rate, delay=delay_ms / 2000))
            address, nic = wire.address(HOSTS[0]), wire.NIC
        ranks: list[subprocess.Popen[Any]] = []
        for number, host in enumerate(HOSTS):
            env = {
                "RANK": str(number), "WORLD_SIZE": str(len(HOSTS)), "MASTER_ADDR": address, "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": nic, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}:{HERE.parents[1]}",
            }  # fmt: skip
            argv = [sys.executable, str(HERE / "loops" / "slow.py"), work, *words]
            output = subprocess.PIPE if number == 0 else None
            ranks.append(lab.popen(host, *argv, env=env, stdout=output))
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            if line.startswith(b"{"):
                yield json.loads(line)
        if ranks[0].wait():
            raise SystemExit(f"rank 0 ended with {ranks[0].returncode}")


def bits(rate: str) -> float:
    """A second, of 100mbit say."""
    return float(rate[:-4]) * BITS[rate[-4:]]


def speeds(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each way the milliseconds of all laps, and how many steps as fast as DDP, round by round."""
    ms: dict[str, list[float]] = {}
    for lap in told:
        ms.setdefault(lap["mode"], []).append(round(lap["ms"], 1))
    base = ms.get(TORCH[0])
    ratios = (
        {name: [round(a / b, 2) for a, b in zip(base, own, strict=False)] for name, own in ms.items()} if base else {}
    )
    return {"ms": ms, "times_ddp": ratios}


def tables(found: dict[str, Any]) -> str:
    """In words: steps a second beside DDP, and the loss after the same samples and after the same time."""
    lines: list[str] = []
    for key, one in found["speeds"].items():
        curves = {
            name: {int(step): loss for step, loss in curve.items()}
            for name, curve in found["losses"].get(key.split()[0], {}).items()
        }
        base = curves.get(TORCH[0], {0: 0.0})
        last = min((max(curve) for curve in curves.values()), default=0)
        lines.append(
            f"\n{key}: ms/step, times DDP (each round), held-out loss after {last} steps; after 20, 60 and 300 s; "
            "seconds until DDP's last loss"
        )
        for name, own in one["ms"].items():
            curve, seconds = curves.get(name, {}), median(own) / 1000
            end = f"{curve[last]:.4f} {100 * (curve[last] / base[last] - 1):+.2f} %" if last in curve else ""
            timed = [max((step for step in curve if step * seconds <= limit), default=0) for limit in (20, 60, 300)]
            told = "  ".join(f"{curve[step]:.4f}" + ("+" if step == last else " ") for step in timed) if curve else ""
            there = next((step for step, loss in sorted(curve.items()) if loss <= base[last]), None)
            until = f"{there * seconds:.0f}" if there else ""
            times = " ".join(f"{ratio:.2f}" for ratio in one["times_ddp"].get(name, []))
            lines.append(f"  {name:13} {median(own):9.1f}  {times:12}  {end:16} {told:25}  {until:>6}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKS, default="W3g")
    parser.add_argument("--rate", default="100mbit", help="of the cable, e.g. 10mbit 100mbit 1gbit")
    parser.add_argument("--delay", type=float, default=20.0, help="ms there and back")
    parser.add_argument("--modes", nargs="+", choices=[*TORCH, *PACELINE], default=[*TORCH, *PACELINE])
    parser.add_argument("--losses", type=int, default=0, help="no times: so many steps, and the losses")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--lap", type=float, default=5.0, help="seconds, more or less")
    parser.add_argument("--table", action="store_true", help="only show what --out has")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.rate[-4:] not in BITS or not arguments.rate[:-4].isdecimal():
        parser.error(f"--rate {arguments.rate}: a whole number and mbit or gbit, e.g. 100mbit, 1gbit")
    empty: dict[str, Any] = {"base": BASE, "hosts": len(HOSTS), "ranks_a_host": 1, "speeds": {}, "losses": {}}
    found = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else empty
    if not arguments.table:
        if why := hindrance():
            print(f"skipped: {why}")
            return 0
        own, told = found["losses"].setdefault(arguments.work, {}), list[dict[str, Any]]()
        pace = ["--rounds", str(arguments.rounds), "--lap", str(arguments.lap)]
        words = ["--losses", str(arguments.losses), *pace, "--modes", *arguments.modes]
        rate, delay = (None, 0.0) if arguments.losses else (bits(arguments.rate), arguments.delay)
        for one in trained(arguments.work, words, rate, delay):  # written down as it comes: the rest may be cut off
            told.append(one)
            if arguments.losses:
                own[one["mode"]] = {step: round(loss, 5) for step, loss in one["losses"].items()}
            else:
                busy = {"load_average": round(os.getloadavg()[0], 1)}
                found["speeds"][f"{arguments.work} {arguments.rate} {arguments.delay:g}ms"] = speeds(told) | busy
            if arguments.out:
                arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(tables(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
