"""Does the first sentence of `paceline report` name the cause that was injected, and do its shares add up?

    python benchmarks/report_causes.py --out benchmarks/results/report-causes.json    # some minutes on 2 quiet cores

The causes are those of scale_causes.py: slow data on one rank, a niced rank, more threads than cores, and, as root, a
link of a limited rate between two hosts. Each is a training of its own; the page is judged by that run alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.report.outcome import find_bottleneck
from paceline.report.run import whole_run
from race.figures import machine
from race.quiet import wait_until_idle
from scale_here import IDLE_SECONDS, LIMIT_SECONDS, TASKS, half_a_core
from scale_hosts import hindrance, hosts

ALLOWED_SUM = 0.05
CAUSES = {  # task, flags, what the first sentence must begin its causes with
    "slow data": ("slow_data", ("--nproc", "2", "--batch-size", "8", "--threads-per-rank", "1"), "rank 1's data"),
    "niced rank": ("niced", ("--nproc", "3", "--batch-size", "1024", "--threads-per-rank", "1"), "waiting for rank 2"),
    "too many threads": (
        "large",
        ("--nproc", "2", "--batch-size", "1024", "--threads-per-rank", "4"),
        "threads compete",
    ),
}
LINK = "the exchange between"


def judged(folder: Path, wanted: str) -> dict[str, Any]:
    """What is said of a run, and whether it is right: the wanted cause is the first that is named."""
    found = find_bottleneck(whole_run(folder))
    causes = found.summary.partition("; ")[2]
    first = found.summary if "compete" in wanted else causes.split(",")[0].split(" and ")[0]
    total = sum(share for cause, share in found.cause_fractions.items() if cause != "not explained")
    return {
        "named": wanted in first and abs(total - 1) <= ALLOWED_SUM, "sum": round(total, 3), "said": found.summary,
        "shares": {cause: round(share, 3) for cause, share in found.cause_fractions.items()},
    }  # fmt: skip


def here(name: str, times: int, folder: Path) -> Iterator[dict[str, Any]]:
    """The same cause several times on this machine."""
    task, flags, wanted = CAUSES[name]
    for number in range(times):
        wait_until_idle(IDLE_SECONDS)
        run_dir = folder / f"{task}-{number}"
        words = ("train", f"{TASKS}:{task}", *flags, "--steps", "60", "--device", "cpu", "--run-dir", str(run_dir))
        command = [sys.executable, "-m", "paceline", *words]
        with half_a_core():
            subprocess.run(command, cwd=folder, capture_output=True, check=True, timeout=LIMIT_SECONDS)
        yield judged(run_dir, wanted)


def over_a_link(times: int) -> Iterator[dict[str, Any]]:
    """Two hosts, whose cable is what is slow."""
    with hosts(2) as found:
        for number in range(times):
            yield judged(found.train(f"{TASKS}:large", 2, 64, 20, f"link-{number}"), LINK)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "causes": {}}
    with tempfile.TemporaryDirectory(prefix="causes-") as folder:
        for name in CAUSES:
            results["causes"][name] = [*here(name, arguments.times, Path(folder))]
    if not hindrance():
        results["causes"]["rate-limited link"] = [*over_a_link(arguments.times)]
    every = [one for found in results["causes"].values() for one in found]
    for name, found in results["causes"].items():
        print(f"{name}: {sum(one['named'] for one in found)} of {len(found)}; {found[0]['said']}")
    print(f"named {sum(one['named'] for one in every)} of {len(every)}")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if sum(one["named"] for one in every) >= 0.9 * len(every) else 1


if __name__ == "__main__":
    sys.exit(main())
