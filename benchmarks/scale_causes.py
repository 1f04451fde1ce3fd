"""Does `paceline scale` name the cause that was injected, and is its estimate for several hosts near what they take?

    python benchmarks/scale_causes.py --out benchmarks/results/scale.json          # about 12 minutes on 2 quiet cores

Causes: one thing is made slow, `scale` is asked, and its largest share must be that thing, with the right rank, and all
shares together the whole loss. Estimates: each number of hosts is estimated from one rank and the stated link. The
hosts are namespaces whose cables have a limited rate (root and the programs of tests/cluster; left out elsewhere).

Each part is written as soon as it is there, and left alone when the file has it already: what was broken off goes on.
What others compute meanwhile spoils numbers: a part begins when the machine is idle, and tells who else was busy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.lab.scale import EXCHANGE, WAITING
from race.figures import machine
from scale_here import TASKS, Injected, cause, injected, judged
from scale_hosts import LONG, RATE, UP_TO_8, estimated_over_hosts, hindrance, shares_over_hosts

ALLOWED_ERROR = 0.10
PARTS = ("causes", "hosts")


def on_this_machine(arguments: argparse.Namespace, done: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(section, name, what was found) of all that is missing."""
    few = ("--steps", "5", "--warmup", "3")
    times, steps = (1, few) if arguments.quick else (arguments.times, ("--steps", "20"))
    for name, one in injected().items() if "causes" in arguments.parts else ():
        if name not in done["causes"]:
            yield "causes", name, cause(name, one, times, steps)


def on_hosts(arguments: argparse.Namespace, done: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The same over hosts, where there can be any."""
    if why := hindrance():
        print(f"hosts: left out, {why}")
        return
    ranks, times, steps = ((1, 2, 3), 1, 6) if arguments.quick else ((1, 2, 3, 4), arguments.times, 15)
    if (name := "rate-limited link") not in done["causes"]:
        one = Injected("", (), EXCHANGE)
        yield "causes", name, [judged(found, one) for found in shares_over_hosts(TASKS, times, steps)]
    if (name := f"hosts, cables of {RATE}") not in done["estimates"]:
        yield "estimates", name, estimated_over_hosts(TASKS, ranks, min(times, 2), steps)
    for link in () if arguments.quick else LONG:
        if (name := f"2 to 8 hosts, links of {link}") not in done["estimates"]:
            yield "estimates", name, estimated_over_hosts(TASKS, UP_TO_8, min(times, 2), steps, link)


def measure(arguments: argparse.Namespace, done: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """All that is asked for and missing."""
    yield from on_this_machine(arguments, done)
    if "hosts" in arguments.parts:
        yield from on_hosts(arguments, done)


def told(section: str, name: str, found: Any) -> str:
    """A line or several for people."""
    if section == "causes":
        right = sum(one["named"] for one in found)
        kinds = "; ".join(f"{one['percent'][one['cause']]:.0f} % {one['cause']}{_rank(one)}" for one in found)
        return f"{name}: named {right} of {len(found)} times ({kinds})"
    lines = [
        f"{name}, {row['mode']}, {row['at']['ranks']} ranks x {row['at']['batch']}: estimated "
        f"{1e3 * row['estimated_seconds']:.1f} ms, measured {1e3 * row['measured_seconds']:.1f} ms: "
        f"{100 * row['error']:+.1f} %"
        for row in found["estimated"]
    ]
    return "\n".join(lines)


def _rank(one: dict[str, Any]) -> str:
    return f", rank {one['rank']}" if one["cause"] == WAITING else ""


def wrong(done: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    found = [name for name, times in done["causes"].items() if not all(one["named"] for one in times)]
    for name, one in done["estimates"].items():
        found += [
            f"{name}, {row['mode']}, {row['at']['ranks']} ranks: {100 * row['error']:+.1f} %"
            for row in one["estimated"] if abs(row["error"]) > ALLOWED_ERROR
        ]  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="how often each cause is injected")
    parser.add_argument("--quick", action="store_true", help="few steps: does it work?")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="causes; hosts")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    done: dict[str, Any] = {"machine": machine(), "quick": arguments.quick, "causes": {}, "estimates": {}}
    if arguments.out and arguments.out.is_file():
        before = json.loads(arguments.out.read_text())
        done = before if before["quick"] == arguments.quick else done
    for section, name, found in measure(arguments, done):
        if found is None:
            continue
        done[section][name] = found
        print(told(section, name, found), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(done, indent=1) + "\n")
    for fault in wrong(done):
        print(f"NOT AS IT MUST BE: {fault}", file=sys.stderr)
    return 1 if wrong(done) and not arguments.quick else 0


if __name__ == "__main__":
    sys.exit(main())
