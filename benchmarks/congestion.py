"""How long is a step over slow cables, by how TCP fills them? The same training under each congestion control.

    python benchmarks/congestion.py --hosts 4 --link 100mbit,10ms --out benchmarks/results/congestion.json

One rank on each host; rounds A B C A B C, each start a new run, because what a control has learned of a cable stays
with its connection. Root only, and the programs of tests/cluster (.ci/install). A control that the kernel does not let
namespaces have is allowed while this runs. What was measured before stays in the record, and is written over by its
name.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from paceline.lab.scale import estimate_exchanged_bytes, parse_network, read_run_steps
from race.figures import machine
from scale_here import TASKS
from scale_hosts import WARM_UP, Lab, hindrance, hosts

SYSTEM = Path("/proc/sys/net/ipv4")


@contextmanager
def any_control() -> Generator[None]:
    """Whoever is in a namespace may choose any congestion control that this kernel has."""
    allowed = SYSTEM / "tcp_allowed_congestion_control"
    before = allowed.read_text()
    allowed.write_text((SYSTEM / "tcp_available_congestion_control").read_text())
    try:
        yield
    finally:
        allowed.write_text(before)


def choose(control: str, lab: Lab) -> None:
    """Have TCP fill the cables of all hosts so."""
    for host in lab.hosts:
        done = lab.run(host, "sh", "-c", f"echo {control} > {SYSTEM}/tcp_congestion_control")
        if done.returncode:
            raise SystemExit(f"no {control} (modprobe tcp_{control}?): {done.stderr}")


def measure(arguments: argparse.Namespace) -> tuple[float, dict[str, list[float]]]:
    """The seconds that the volume alone takes, and the median step of each start, by strategy and control."""
    found: dict[str, list[float]] = {}
    network = parse_network(arguments.link)
    with any_control(), hosts(arguments.hosts, network) as there:
        size = 0
        for number in range(arguments.rounds):
            for control in arguments.controls:
                choose(control, there.lab)
                for strategy in arguments.strategies:
                    name = f"{strategy}-{control}-{number}"
                    run = there.train(f"{TASKS}:large", arguments.hosts, 64, arguments.steps, name, strategy=strategy)
                    steps = [
                        max(one.seconds for one in step.values()) for step in read_run_steps(run, skip=WARM_UP).steps
                    ]
                    found.setdefault(f"{strategy}, {control}", []).append(median(steps))
                    size = estimate_exchanged_bytes([run])
                    print(f"{name}: {median(steps):.3f} s", flush=True)
    sent = 2.0 * (arguments.hosts - 1) / arguments.hosts * size  # by each host in a ring all-reduce
    return sent / network.bytes_per_second, found


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--link", default="100mbit,10ms", help="rate of each cable, and the time of one message")
    parser.add_argument("--controls", nargs="+", default=["cubic", "reno", "bbr"])
    parser.add_argument("--strategies", nargs="+", default=["bucketed", "ddp"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if why := hindrance():
        raise SystemExit(why)
    alone, found = measure(arguments)
    print(f"the volume alone: {alone:.3f} s; least, median, most of the starts' median steps:")
    for name, seconds in found.items():
        print(f"{name:20} {min(seconds):.3f} {median(seconds):.3f} {max(seconds):.3f} s")
    if arguments.out:
        record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        record["machine"] = machine()
        record[f"{arguments.hosts} hosts, {arguments.link}"] = {
            "volume_alone_seconds": alone,
            "median_step_seconds_of_each_start": found,
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
