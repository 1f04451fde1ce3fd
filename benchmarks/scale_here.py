"""What does `paceline scale` say on this machine, where one thing was made slow?

Used by scale_causes.py.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.host.cgroup import usable_cores
from paceline.lab.scale import COMPUTE, REST, WAITING
from race.quiet import foreign_share, look, wait_until_idle

TASKS = Path(__file__).resolve().parents[1] / "tests" / "lab" / "tasks_to_measure.py"
SLOW_GROUP = "SLOW_CPU_GROUP"  # as in these tasks
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")  # version 1
HALF = {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "5000"}
ALLOWED_SUM = 5.0
IDLE_SECONDS = 20.0  # how long is waited for others to be quiet, at most
LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Injected:
    """A task in which one thing is slow, and what must be said of it."""

    task: str
    flags: tuple[str, ...]
    cause: str
    rank: int | None = None
    words: str = ""
    """which the sentence must have"""


def injected() -> dict[str, Injected]:
    """All on this machine."""
    cores = usable_cores()
    usual = ("--batch-size", "1024", "--threads-per-rank")
    turns = f"({cores} threads per core)"
    return {
        "slow data": Injected(
            "slow_data", ("--ranks", "1,2", "--batch-size", "8"), WAITING, 1, "(rank 1, in its data)"
        ),
        "niced rank": Injected("niced", ("--ranks", f"1,{cores + 1}", *usual, "1"), WAITING, cores),
        "cpu-limited rank": Injected("limited", ("--ranks", "1,2", *usual, "1"), WAITING, 1),
        "wrong threads": Injected("large", ("--ranks", f"1,{cores}", *usual, str(cores)), COMPUTE, None, turns),
    }


def scale(*words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """What `paceline scale WORDS` finds, as JSON, with what it prints under "said", and how busy others were."""
    wait_until_idle(IDLE_SECONDS)
    before, own = look(), _children_seconds()
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "paceline", "scale", *words, "--device", "cpu", "--out", str(out)]
        run = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            env={**os.environ, **(env or {})},
        )
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{run.stderr}{run.stdout}")
        found = json.loads(out.read_text())
    busy = foreign_share(before, look(), _children_seconds() - own)
    return {**found, "said": run.stdout, "foreign": round(busy, 3)}


def _children_seconds() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


@contextmanager
def half_a_core() -> Generator[dict[str, str]]:
    """A cgroup that has half a core, as the environment names it to the task; empty where none can be made."""
    folder = CPU_GROUPS / f"paceline-scale-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        yield {}
        return
    try:
        for name, value in HALF.items():
            (folder / name).write_text(value)
        yield {SLOW_GROUP: str(folder)}
    finally:
        folder.rmdir()


def judged(found: dict[str, Any], one: Injected) -> dict[str, Any]:
    """What was said of one run, and whether it is right."""
    [lost] = found["lost"]
    first, slowest = lost["shares"][0], lost["slowest"]
    total = sum(share["percent"] for share in lost["shares"] if share["cause"] != REST)
    named = first["cause"] == one.cause and one.words in found["said"]
    named = named and (one.rank is None or slowest == one.rank) and lost["lost_seconds"] > 0
    return {
        "named": named and abs(total - 100) <= ALLOWED_SUM,
        "cause": first["cause"],
        "rank": slowest,
        "phase": lost["slow_phase"],
        "percent": {share["cause"]: round(share["percent"], 1) for share in lost["shares"]},
        "sum": round(total, 1),
        "lost": round(1 - lost["efficiency"]["median"], 3),
        "foreign": found.get("foreign"),
    }


def cause(name: str, one: Injected, times: int, steps: Sequence[str]) -> list[dict[str, Any]] | None:
    """The same injection several times; None where it cannot be injected here."""
    found: list[dict[str, Any]] = []
    for _ in range(times):
        with half_a_core() as env:
            if one.task == "limited" and not env:
                print(f"{name}: left out, there is no cgroup (version 1) for processor time that may be made")
                return None
            words = (f"{TASKS}:{one.task}", *one.flags, "--mode", "weak", *steps, "--rounds", "1")
            found.append(judged(scale(*words, env=env), one))
    return found
