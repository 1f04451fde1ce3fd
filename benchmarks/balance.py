"""--balance on two ranks, one with half a core: the time of a step, its lower limit, and when a slowdown is corrected.

    sudo python benchmarks/balance.py --out benchmarks/results/balance.json     # the kernel's quota needs root

Rank 1 gets half a core by a quota of its cgroup. If one whole core needs T seconds for a step, one and a half need at
least T / 1.5, the harmonic limit. Equal shares, the ratio 2:1 and auto take turns. Weights must be equal in all runs.
Then the quota begins in the middle of a run: for a few steps, and for good.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from paceline.runs.events import Step, event_files, read_events
from paceline.runs.summary import read_summary

VIRTUAL_RANKS, STEPS, WARM_UP_STEPS = 12, 120, 10
GROUP = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000


class HalfACore:
    """Limits the process with RANK=1 of a run to half a core while `limited` is set, also after a restart."""

    def __init__(self, run_id: str) -> None:
        self.limited = threading.Event()
        self._group, self._mark = GROUP / f"paceline-balance-{os.getpid()}", run_id.encode()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> HalfACore:
        self._group.mkdir()
        (self._group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for pid in (self._group / "cgroup.procs").read_text().split():
            (GROUP / "cgroup.procs").write_text(pid)
        self._group.rmdir()

    def _follow(self) -> None:
        while not self._ended.wait(0.02):
            quota = str(PERIOD_US // 2) if self.limited.is_set() else "-1"
            (self._group / "cpu.cfs_quota_us").write_text(quota)
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    variables = (folder / "environ").read_bytes().split(b"\0")
                    if b"RANK=1" in variables and b"BALANCE_RUN=" + self._mark in variables:
                        (self._group / "cgroup.procs").write_text(folder.name)


def run(folder: Path, ranks: int, *flags: str, steps: int = STEPS, limits: Iterator[tuple[int, bool]]) -> Path:
    """Train; `limits` yields (step, whether rank 1 has half a core from that step on). Returns the run folder."""
    mark = folder.name
    command = [sys.executable, "-m", "paceline", "train", "mnist-cnn", "--strategy", "exact", "--nproc", str(ranks)]
    command += ["--virtual-ranks", str(VIRTUAL_RANKS), "--global-batch", str(32 * VIRTUAL_RANKS), "--preload", "off"]
    command += ["--steps", str(steps), "--threads-per-rank", "1", "--run-dir", str(folder), *flags]
    environment = os.environ | {"BALANCE_RUN": mark}
    with HalfACore(mark) as half:
        first, change = next(limits), next(limits, None)
        if first[1]:
            half.limited.set()
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        while process.poll() is None:
            time.sleep(0.05)
            if change is not None and steps_of(folder) and steps_of(folder)[-1].step >= change[0]:
                half.limited.set() if change[1] else half.limited.clear()
                change = next(limits, None)
    if process.returncode:
        raise SystemExit(process.stdout.read() if process.stdout else "")
    return folder


def steps_of(folder: Path) -> list[Step]:
    """The steps of rank 0, the repeated ones as they were done last."""
    files = event_files(folder) if folder.exists() else {}
    found = {event.step: event for event in read_events(files[0]) if isinstance(event, Step)} if 0 in files else {}
    return [found[step] for step in sorted(found)]


def step_seconds(folder: Path) -> float:
    """The median time from step to step with the last assignment, after its first steps."""
    steps = steps_of(folder)
    steps = [step for step in steps if step.share == steps[-1].share][WARM_UP_STEPS:]
    return median(after.unix_time - before.unix_time for before, after in pairwise(steps))


def changed_at(folder: Path) -> list[int]:
    """The steps at which the assignment changed."""
    steps = steps_of(folder)
    return [after.step for before, after in pairwise(steps) if before.share != after.share]


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kinds = {"equal": (), "2:1": ("--balance", "2:1"), "auto": ("--balance", "auto")}
    times: dict[str, list[float]] = {name: [] for name in ("one process", *kinds)}
    digests: set[str] = set()
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        for number in range(options.rounds):
            for name, flags in {"one process": (), **kinds}.items():
                ranks = 1 if name == "one process" else 2
                folder = run(top / f"{name.replace(':', '-').replace(' ', '-')}-{number}", ranks, *flags,
                             limits=iter([(0, ranks == 2)]))  # fmt: skip
                times[name].append(step_seconds(folder))
                digests.add(str(read_summary(folder).weights_sha256))
                print(number, name, f"{times[name][-1]:.4f} s", flush=True)
        limit = median(times["one process"]) / 1.5
        temporary_slowdown = run(
            top / "temporary", 2, *kinds["auto"], limits=iter([(0, False), (30, True), (36, False)])
        )
        permanent_slowdown = run(top / "permanent", 2, *kinds["auto"], limits=iter([(0, False), (30, True)]))
        record: dict[str, Any] = {
            "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "virtual_ranks": VIRTUAL_RANKS, "seconds_per_step": times, "harmonic_limit_seconds": limit,
            "of_the_limit": {name: round(limit / median(times[name]), 3) for name in kinds},
            "digests": len(digests),
            "restarts_after_6_slow_steps": changed_at(temporary_slowdown),
            "slow_from_step_30_corrected_at": changed_at(permanent_slowdown),
        }  # fmt: skip
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
