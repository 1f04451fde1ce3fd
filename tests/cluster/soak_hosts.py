"""Hosts that are lost at random and come back, and new ones that join: the same bits, a clean ledger, nobody left.

    PYTHONPATH=. python tests/cluster/soak_hosts.py --count 34 --out benchmarks/results/hosts.json

Runs of 2 to 4 hosts over real sshd, one process on each, strategy exact. In each three times something happens to one
that is not node 0's: power off, cut, all processes killed, a cable of 1 Mbit/s; after 1 to 60 s it is whole again.
In some runs a further host joins by `paceline join`. Seeded; typed again it goes on where it was, and --part K N takes
every N-th run, beside others that write to the same record. Root.
"""

import argparse
import fcntl
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts
from tests.cluster.training import EXACT, PACELINE, clean_ledger, events, steps_done, trained_here, weights, words

FAULTS = ("power_off", "cut", "kill", "slow")
EVENTS, PLACES = 3, 4
RUN_SECONDS = 600.0
STEP_SECONDS = 0.03  # that a step takes at least: time for hosts to come and go, and little work for the machine

TASK = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline import Task

def data(split):
    generator = torch.Generator().manual_seed(len(split))
    x = torch.randn(512, 16, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())

def loss(output, target):
    time.sleep(STEP_SECONDS)
    return nn.functional.cross_entropy(output, target, reduction="none")

def model():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))

task = Task(make_model=model, make_dataset=data, loss=loss)
"""


@dataclass
class Result:
    """What one run has shown; `wrong` is empty where all was right."""

    seed: int
    hosts: int
    faults: list[list[Any]] = field(default_factory=list[list[Any]])  # which, on which host, for how many seconds
    joined: bool = False
    generations: int = 0
    returns: int = 0  # generations with more hosts than the one before
    standstill_seconds: list[float] = field(default_factory=list[float])  # of those, from step to step
    steps_again: list[int] = field(default_factory=list[int])  # of a generation: how many steps were lost
    wrong: str = ""


def soak(seeds: Sequence[int], seconds: float, out: Path) -> None:
    """The runs of these seeds; those that are in `out` already are not done again, and none begins after `seconds`."""
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        (root / "lab").mkdir()
        script = root / "task.py"
        lab = Lab(root / "lab", 1 + PLACES)
        try:
            ssh = SshHosts.start(lab, root / "lab")
            task = words("train", f"{script}:task", "--steps", 900, "--batch-size", 4, *EXACT, "--checkpoint-every", 50)
            script.write_text(TASK.replace("STEP_SECONDS", "0"))
            expected = trained_here(task, root / "expected", 300)
            script.write_text(TASK.replace("STEP_SECONDS", f"{STEP_SECONDS}"))
            for seed in seeds:
                if time.monotonic() > until:
                    break
                if any(one.seed == seed for one in recorded(out)):
                    continue
                result = one_run(lab, ssh, task, root / f"run-{seed}", seed, expected)
                record(out, result)
                print(seed, result.wrong or "right", result.faults, f"{result.returns} returns", flush=True)
                lab.restore()
        finally:
            lab.close()


def one_run(lab: Lab, ssh: SshHosts, task: list[str], run_dir: Path, seed: int, expected: str) -> Result:
    """One run with its faults, judged."""
    chance = random.Random(seed)
    result = Result(seed, chance.randint(2, PLACES))
    hosts = [f"n{2 + number}" for number in range(result.hosts)]
    result.joined = result.hosts < PLACES and chance.random() < 0.5
    where = words(
        "--on", "ssh", "--hosts", ",".join(hosts), "--nodes", f"1:{PLACES}", "--nproc", 1, "--ssh", ssh.command
    )
    output, joined = (run_dir.parent / f"{run_dir.name}{name}.txt" for name in ("", "-join"))
    with output.open("wb") as file:
        launcher = lab.popen(
            "n1", *PACELINE, *task, *where, "--run-dir", run_dir, cwd=run_dir.parent, stdout=file, stderr=file,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    joiner: subprocess.Popen[Any] | None = None
    deadline = time.monotonic() + RUN_SECONDS
    try:
        wait(lambda: steps_done(run_dir) >= 10 or launcher.poll() is not None, deadline)
        for number in range(EVENTS):
            time.sleep(chance.uniform(1.0, 5.0))
            if number == 1 and result.joined:
                with joined.open("wb") as file:
                    joiner = lab.popen(f"n{2 + result.hosts}", *PACELINE, "join", run_dir, cwd=run_dir.parent,
                                       stdin=subprocess.DEVNULL, stdout=file, stderr=file)  # fmt: skip
            fault, host = chance.choice(FAULTS), chance.choice(hosts[1:])
            away = min(60.0, 1.0 + chance.expovariate(1 / 12.0))
            if launcher.poll() is not None:
                break
            result.faults.append([fault, host, round(away, 1)])
            happen(lab, fault, host, away)
        code = launcher.wait(max(1.0, deadline - time.monotonic()))
        said = output.read_text(errors="replace")
        result.wrong = "" if code == 0 else f"exit code {code}: {said[-1500:]}"
        if joiner is not None and not result.wrong and (own := joiner.wait(30)):
            result.wrong = f"paceline join ended with {own}: {joined.read_text(errors='replace')[-1500:]}"
        count_steps(run_dir, result)
        if not result.wrong:
            result.wrong = "" if weights(run_dir) == expected else "other weights"
            clean_ledger(run_dir)
        wait(lambda: not left(lab), time.monotonic() + 45.0)
    except (AssertionError, subprocess.TimeoutExpired, TimeoutError) as error:
        result.wrong = result.wrong or f"{type(error).__name__}: {error} {left(lab)} {output.read_text()[-1500:]}"
    finally:
        for process in (launcher, joiner):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    return result


def happen(lab: Lab, fault: str, host: str, seconds: float) -> None:
    if fault == "slow":
        lab.rate(host, "1mbit")
    else:
        getattr(lab, fault)(host)
    time.sleep(seconds)
    if fault == "slow":
        lab.rate(host, None)
    elif fault == "cut":
        lab.heal(host)
    else:
        lab.boot(host)


def count_steps(run_dir: Path, result: Result) -> None:
    """From rank 0's events: which generations there were, and what each has cost."""
    last_step, last_time, waits, ranks = 0, 0.0, False, 0
    for event in events(run_dir):
        if event.get("kind") == "started":
            start, before, ranks = int(str(event.get("start_step", 0))), ranks, int(str(event["world_size"]))
            result.generations += 1
            waits = result.generations > 1 and ranks > before
            if result.generations > 1 and start < last_step:
                result.steps_again.append(last_step - start)
        elif event.get("kind") == "step":
            now = float(str(event["unix_time"]))
            if waits:
                result.returns += 1
                result.standstill_seconds.append(round(now - last_time, 2))
            last_step, last_time, waits = int(str(event["step"])), now, False


def left(lab: Lab) -> dict[str, dict[int, str]]:
    return {host: found for host in lab.hosts if (found := lab.processes(host))}


def wait(done: Callable[[], bool], deadline: float) -> None:
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError("it takes too long")
        time.sleep(0.2)


def recorded(out: Path) -> list[Result]:
    return [Result(**one) for one in json.loads(out.read_text())["runs"]] if out.exists() else []


def record(out: Path, result: Result) -> None:
    """Add one run to those of all parts."""
    folder = os.open(out.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        write(out, sorted([*recorded(out), result], key=lambda one: one.seed))
    finally:
        os.close(folder)


def write(out: Path, results: list[Result]) -> None:
    stood = sorted(seconds for one in results for seconds in one.standstill_seconds)
    summary = {
        "runs": len(results),
        "right": sum(not one.wrong for one in results),
        "losses": sum(len(one.faults) for one in results),
        "by fault": {fault: sum(fault == told[0] for one in results for told in one.faults) for fault in FAULTS},
        "returns": sum(one.returns for one in results),
        "standstill seconds: median, most": [stood[len(stood) // 2], stood[-1]] if stood else None,
        "most steps done again": max((steps for one in results for steps in one.steps_again), default=0),
    }
    out.write_text(json.dumps({"summary": summary, "runs": [asdict(one) for one in results]}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=34)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("K", "N"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after that")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    first, every = options.part
    soak(range(options.seed + first, options.seed + options.count, every), options.seconds, options.out)
    return int(any(one.wrong for one in recorded(options.out)))


if __name__ == "__main__":
    raise SystemExit(main())
