"""--balance on two ranks, one with half a core: the time of a step, its lower limit, and when a slowdown is corrected.

    sudo python benchmarks/balance.py --part speed --out FILE      # the kernel's quota needs root
    python benchmarks/balance.py --part slowdowns --out FILE

speed: rank 1 gets half a core by a quota of its cgroup. If one whole core needs T seconds for a step, one and a half
need at least T / 1.5, the harmonic limit. Equal shares, the ratio 2:1 and auto take turns. Weights must be equal in all
runs. sleeps: the same on a busy machine. The forward sleeps, and that of rank 1 twice as long. slowdowns: rank 1 begins
to sleep twice as long in the middle of a run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from paceline.runs.events import Step, event_files, read_events
from paceline.runs.summary import read_summary

VIRTUAL_RANKS, STEPS, WARM_UP_STEPS = 12, 120, 10
SLOW_FROM = 31
GROUP = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000


TASK = """
import os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline import Task

first, last = map(int, os.environ["BALANCE_SLOW"].split(":"))
slow = False

class Sleeps(nn.Linear):
    def forward(self, x):
        if self.training:
            time.sleep(0.12 if slow else 0.06)
        return super().forward(x)

def on_step(report):
    global slow
    slow = os.environ["RANK"] == "1" and first <= report.step + 1 <= last

x = torch.randn(4800, 8, generator=torch.Generator().manual_seed(0))
task = Task(
    make_model=lambda: Sleeps(8, 4), make_dataset=lambda split: TensorDataset(x, (x.sum(1) > 0).long()),
    loss=lambda o, t: nn.functional.cross_entropy(o, t, reduction="none"), on_step=on_step,
)
"""


class HalfACore:
    """Limits the process with RANK=1 of a run to half a core, also after a restart."""

    def __init__(self, run_id: str) -> None:
        self._group, self._mark = GROUP / f"paceline-balance-{os.getpid()}", run_id.encode()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> None:
        self._group.mkdir()
        (self._group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._group / "cpu.cfs_quota_us").write_text(str(PERIOD_US // 2))
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for pid in (self._group / "cgroup.procs").read_text().split():
            (GROUP / "cgroup.procs").write_text(pid)
        self._group.rmdir()

    def _follow(self) -> None:
        while not self._ended.wait(0.02):
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    variables = (folder / "environ").read_bytes().split(b"\0")
                    if b"RANK=1" in variables and b"BALANCE_RUN=" + self._mark in variables:
                        (self._group / "cgroup.procs").write_text(folder.name)


def run(folder: Path, task: str, ranks: int, *flags: str, **variables: str) -> None:
    command = [sys.executable, "-m", "paceline", "train", task, "--strategy", "exact", "--nproc", str(ranks)]
    command += ["--virtual-ranks", str(VIRTUAL_RANKS), "--global-batch", str(32 * VIRTUAL_RANKS), "--preload", "off"]
    command += ["--steps", str(STEPS), "--threads-per-rank", "1", "--run-dir", str(folder), *flags]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


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


def measure_speed(top: Path, rounds: int, *, sleeps: bool = False) -> dict[str, Any]:
    """Take turns: one process, equal shares, 2:1 and auto. Rank 1 has half a core, or sleeps twice as long."""
    task = "mnist-cnn"
    if sleeps:
        (top / "sleeps.py").write_text(TASK)
        task = f"{top / 'sleeps.py'}:task"
    kinds = {"equal": (), "2:1": ("--balance", "2:1"), "auto": ("--balance", "auto")}
    times: dict[str, list[float]] = {name: [] for name in ("one process", *kinds)}
    digests: set[str] = set()
    for number in range(rounds):
        for name, flags in {"one process": (), **kinds}.items():
            ranks = 1 if name == "one process" else 2
            folder = top / f"{name.replace(':', '-').replace(' ', '-')}-{number}"
            with HalfACore(folder.name) if ranks == 2 and not sleeps else contextlib.nullcontext():
                run(folder, task, ranks, *flags, BALANCE_RUN=folder.name, BALANCE_SLOW=f"1:{STEPS}")
            times[name].append(step_seconds(folder))
            digests.add(str(read_summary(folder).weights_sha256))
            print(number, name, f"{times[name][-1]:.4f} s", flush=True)
    limit = median(times["one process"]) / 1.5
    return {
        "virtual_ranks": VIRTUAL_RANKS, "seconds_per_step": times, "harmonic_limit_seconds": limit,
        "of_the_limit": {name: round(limit / median(times[name]), 3) for name in kinds},
        "digests": len(digests),
    }  # fmt: skip


def measure_slowdowns(top: Path, rounds: int) -> dict[str, Any]:
    """With auto, let rank 1 need twice the time from step 31 on: for 5 to 10 steps, and for good."""
    task = top / "sleeps.py"
    task.write_text(TASK)
    records: list[dict[str, Any]] = []
    for number, slow_steps in itertools.product(range(rounds), (5, 10, STEPS)):
        folder = top / f"slow-{slow_steps}-{number}"
        run(folder, f"{task}:task", 2, "--balance", "auto", BALANCE_SLOW=f"{SLOW_FROM}:{SLOW_FROM + slow_steps - 1}")
        steps = steps_of(folder)
        corrected = [step - SLOW_FROM for step in changed_at(folder)]
        record: dict[str, Any] = {"slow_steps": slow_steps, "new_assignment_after_steps": corrected}
        if corrected:
            record["restart_seconds"] = round(max(b.unix_time - a.unix_time for a, b in pairwise(steps)), 1)
        records.append(record)
        print(record, flush=True)
    return {"slow_from_step": SLOW_FROM, "runs": records}


def main() -> None:
    """Measure, and update the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("speed", "sleeps", "slowdowns"), required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--note", default="", help="for example that the machine was busy")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        parts = {"speed": measure_speed, "sleeps": partial(measure_speed, sleeps=True), "slowdowns": measure_slowdowns}
        measured = parts[options.part](Path(temporary), options.rounds)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    part = {"commit": commit, "date": date, "load": round(os.getloadavg()[0], 1), "note": options.note, **measured}
    print(json.dumps(part, indent=1))
    if options.out:
        record = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps(record | {options.part: part}, indent=1) + "\n")


if __name__ == "__main__":
    main()
